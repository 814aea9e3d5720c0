"""Child processes that may be killed: each is forked from a server that has imported everything, so it starts at once.

A child is a process of its own, with its own memory, signals and limits; only the seconds of importing are shared.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

SECONDS = 240.0  # no child takes longer, even beside others' work: one that does is stuck, and fails its test
KILLED = -signal.SIGKILL


@functools.cache
def _server() -> ForkServerContext:
    """The context of the server, started with this process's import path (it takes only PYTHONPATH over)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["children_warm"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def call(function: Callable[..., None], case: Any, place: Path, *more: Any, seconds: float = SECONDS) -> int:
    """Run `function(case, place, *more)` in a process of its own, what it prints going to `place/log`; its exit code."""
    log = place / "log"
    process = _server().Process(target=_run, args=(function, (case, place, *more), os.fspath(log)))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join(5)
        raise AssertionError(f"the process did not end within {seconds} s; its log:\n{log.read_text()}")
    code = process.exitcode
    assert code is not None
    return code


def succeed(function: Callable[..., None], case: Any, place: Path, *more: Any, seconds: float = SECONDS) -> None:
    """`call` for a process that must end well; its log is shown if it does not."""
    code = call(function, case, place, *more, seconds=seconds)
    assert code == 0, f"exit code {code}; its log:\n{(place / 'log').read_text()}"


def _run(function: Callable[..., None], arguments: tuple[Any, ...], log: str) -> None:
    import torch

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    function(*arguments)

"""Child processes that may be killed: each is forked from a server that has imported everything, so it starts at once.

A child is a process of its own, with its own memory, signals and limits; only the seconds of importing are shared.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 60.0  # no child takes longer: one that does is stuck, and fails its test

_PRELOAD = [
    "datasets",
    "pandas",
    "peft",
    "lowpeak.training.grpo",
    "lowpeak.training.rloo",
    "lowpeak.training.sft",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)

KILLED = -signal.SIGKILL


def call(function: Callable[..., None], *arguments: Any, log: Path, seconds: float = SECONDS) -> int:
    """Run `function(*arguments)` in a process of its own, what it prints going to `log`; its exit code."""
    process = _context.Process(target=_run, args=(function, arguments, os.fspath(log)))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join(5)
        raise AssertionError(f"the process did not end within {seconds} s; its log:\n{log.read_text()}")
    code = process.exitcode
    assert code is not None
    return code


def succeed(function: Callable[..., None], *arguments: Any, log: Path) -> None:
    """`call` for a process that must end well; its log is shown if it does not."""
    code = call(function, *arguments, log=log)
    assert code == 0, f"exit code {code}; its log:\n{log.read_text()}"


def _run(function: Callable[..., None], arguments: tuple[Any, ...], log: str) -> None:
    import torch
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which a killed process would leak
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    function(*arguments)
    sys.stdout.flush()

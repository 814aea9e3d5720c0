"""Processes of a test, alone or as ranks: each is forked from a server that has imported everything, so it starts at once.

A child is a process of its own, with its own memory, signals, sockets and limits; only the seconds of importing are shared.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

SECONDS = 240.0  # no child takes longer, even beside others' work: one that does is stuck, and fails its test
KILLED = -signal.SIGKILL
# Without the threshold glibc keeps freed shards in its heaps, and resident memory says nothing.
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "DS_ACCELERATOR": "cpu"}


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (minus the signal that killed it), what it wrote, and when (monotonic seconds)."""

    code: int
    log: str
    at: float


def call(function: Callable[..., None], case: Any, place: Path, *more: Any, seconds: float = SECONDS) -> int:
    """Run `function(case, place, *more)` in a process of its own, what it prints going to `place/log`; its exit code."""
    return finish([start(function, (case, place, *more), place / "log")], [place / "log"], seconds)[0].code


def succeed(function: Callable[..., None], case: Any, place: Path, *more: Any, seconds: float = SECONDS) -> None:
    """`call` for a process that must end well; its log is shown if it does not."""
    code = call(function, case, place, *more, seconds=seconds)
    assert code == 0, f"exit code {code}; its log:\n{(place / 'log').read_text()}"


def run_ranks(
    function: Callable[..., None], place: Path, *more: Any, world_size: int = 2, seconds: float = SECONDS
) -> list[Ended]:
    """Run `function(place, *more)` on so many ranks; AssertionError, with what they wrote, where one does not end."""
    place.mkdir(parents=True, exist_ok=True)
    logs = [place / f"rank{rank}.log" for rank in range(world_size)]
    return finish(start_ranks(function, (place, *more), logs), logs, seconds)


def succeed_on_ranks(function: Callable[..., None], place: Path, *more: Any, **options: Any) -> None:
    """`run_ranks` for ranks that must all end well."""
    ended = run_ranks(function, place, *more, **options)
    assert all(rank.code == 0 for rank in ended), "\n".join(f"{rank.code}: {rank.log}" for rank in ended)


def start_ranks(function: Callable[..., None], arguments: Sequence[Any], logs: Sequence[Path]) -> list[BaseProcess]:
    """One rank for each log, under way."""
    world_size, port = str(len(logs)), str(free_port())
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return [start(function, arguments, log, env | {"RANK": str(i), "LOCAL_RANK": str(i)}) for i, log in enumerate(logs)]


def start(
    function: Callable[..., None], arguments: Sequence[Any], log: Path, env: dict[str, str] | None = None
) -> BaseProcess:
    """A child under way, which writes to `log`."""
    process = _server().Process(target=_run, args=(function, tuple(arguments), env or {}, os.fspath(log)))
    process.start()
    return process


def finish(processes: Sequence[BaseProcess], logs: Sequence[Path], seconds: float) -> list[Ended]:
    """How each ended; AssertionError with what they wrote where one does not within the limit. All are gone afterwards."""
    ends: dict[int, float] = {}
    deadline = time.monotonic() + seconds
    while len(ends) < len(processes) and time.monotonic() < deadline:
        for i, process in enumerate(processes):
            if i not in ends and not process.is_alive():
                ends[i] = time.monotonic()
        time.sleep(0.01)
    for process in processes:
        process.kill()
        process.join(5)
    outputs = [log.read_text() if log.exists() else "" for log in logs]
    hung = [i for i in range(len(processes)) if i not in ends]
    assert not hung, f"processes {hung} did not end within {seconds} s:\n" + "\n".join(outputs)
    return [Ended(int(p.exitcode or 0), outputs[i], ends[i]) for i, p in enumerate(processes)]


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@functools.cache
def _server() -> ForkServerContext:
    """The context of the server, started with this process's import path (it takes only PYTHONPATH over)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["child_process_imports"])
    before = dict(os.environ)
    os.environ.update(QUIET, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    try:
        forkserver.ensure_running()
    finally:
        for name in (*QUIET, "PYTHONPATH"):
            os.environ.pop(name)
            if name in before:
                os.environ[name] = before[name]
    return context


def _run(function: Callable[..., None], arguments: tuple[Any, ...], env: dict[str, str], log: str) -> None:
    import torch

    os.environ.update(QUIET, **env)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    function(*arguments)

"""Ranks as processes forked from a server that has imported everything: each starts at once, with its own signals and sockets."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from spawn import QUIET, free_port

SECONDS = 240.0  # no rank takes longer, even beside others' work: one that does hangs, and fails its test


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (minus the signal that killed it), what it wrote, and when (monotonic seconds)."""

    code: int
    log: str
    at: float


def run_ranks(
    function: Callable[..., None], place: Path, *more: Any, world_size: int = 2, seconds: float = SECONDS
) -> list[Ended]:
    """Run `function(place, *more)` on so many ranks; AssertionError, with what they wrote, where one does not end."""
    place.mkdir(parents=True, exist_ok=True)
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    logs = [place / f"rank{rank}.log" for rank in range(world_size)]
    processes = [
        _server().Process(
            target=_run, args=(function, (place, *more), env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, str(log))
        )
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    ends: dict[int, float] = {}
    deadline = time.monotonic() + seconds
    while len(ends) < world_size and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ends and not process.is_alive():
                ends[rank] = time.monotonic()
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join(5)
    told = [log.read_text() if log.exists() else "" for log in logs]
    hung = [rank for rank in range(world_size) if rank not in ends]
    assert not hung, f"ranks {hung} did not end within {seconds} s:\n" + "\n".join(told)
    return [Ended(int(p.exitcode or 0), told[rank], ends[rank]) for rank, p in enumerate(processes)]


def succeed(function: Callable[..., None], place: Path, *more: Any, **options: Any) -> None:
    """`run_ranks` for ranks that must all end well."""
    ended = run_ranks(function, place, *more, **options)
    assert all(rank.code == 0 for rank in ended), "\n".join(f"{rank.code}: {rank.log}" for rank in ended)


@functools.cache
def _server() -> ForkServerContext:
    """The context of the server, started with this process's import path (it takes only PYTHONPATH over)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forked_warm"])
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

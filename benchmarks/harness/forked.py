"""Measured sides as forks of a server that has imported everything: each starts at once, with a memory of its own."""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from benchmarks.harness.process import SideError, one_thread

_IMPORTED = ("benchmarks.harness.planned",)


def run_forked(
    function: Callable[..., None], arguments: tuple[Any, ...], place: Path, ranks: int, limit_s: float
) -> None:
    """Run `function(*arguments)` on so many ranks, whose words go to `place/log<rank>`; SideError where one fails."""
    network = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        env = (
            network | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)} if ranks > 1 else {}
        )
        target = (function, arguments, env, os.fspath(place / f"log{rank}"))
        processes.append(_server().Process(target=_run, args=target))
        processes[-1].start()
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()
    for rank, process in enumerate(processes):
        if process.exitcode:
            raise SideError(f"rank {rank} ended with {process.exitcode}: {(place / f'log{rank}').read_text()[-3000:]}")


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@functools.cache
def _server() -> ForkServerContext:
    """The context of the server, which is started with one thread and glibc's blocks given back."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    before = dict(os.environ)
    os.environ.update(one_thread(os.environ), MALLOC_MMAP_THRESHOLD_="65536")
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _run(function: Callable[..., None], arguments: tuple[Any, ...], env: dict[str, str], log: str) -> None:
    import torch

    os.environ.update(one_thread(os.environ), **env)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    function(*arguments)

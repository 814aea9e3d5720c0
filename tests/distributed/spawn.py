"""Starts the ranks of a test as processes of their own, as a launcher would, and ends them when they take too long."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TESTS = Path(__file__).parent.parent
PLACES = (TESTS.parent / "src", TESTS.parent, TESTS, TESTS / "distributed")  # the root for what examples/ holds
# Without the threshold glibc keeps freed shards in its heaps, and resident memory says nothing.
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "DS_ACCELERATOR": "cpu"}


def launch(
    script: str,
    arguments: Sequence[str],
    world_size: int = 2,
    timeout: float = 600,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """Run `tests/distributed/<script>` on so many ranks; what each wrote. AssertionError where one fails or hangs."""
    processes = start(script, arguments, world_size, env)
    results = finish(processes, timeout)
    told = "\n".join(f"[rank {rank}] {output}" for rank, (_, output) in enumerate(results))
    assert all(code == 0 for code, _ in results), f"ranks ended with {[code for code, _ in results]}:\n{told}"
    return [output for _, output in results]


def start(
    script: str, arguments: Sequence[str], world_size: int = 2, env: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """The ranks' processes, under way."""
    common = {
        **os.environ,
        **QUIET,
        "PYTHONPATH": os.pathsep.join(map(str, PLACES)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        **(env or {}),
    }
    return [
        subprocess.Popen(
            [sys.executable, str(TESTS / "distributed" / script), *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]


def finish(processes: Sequence[subprocess.Popen[str]], timeout: float) -> list[tuple[int, str]]:
    """Exit status and output of each rank; those that still run at the limit, or after another failed, are ended."""
    from concurrent.futures import ThreadPoolExecutor

    deadline = time.monotonic() + timeout
    with ThreadPoolExecutor(len(processes)) as pool:
        outputs = [pool.submit(lambda process=process: process.communicate()[0]) for process in processes]
        failed_at: float | None = None
        while any(process.poll() is None for process in processes):
            now = time.monotonic()
            if failed_at is None and any(process.poll() for process in processes):
                failed_at = now
            if now > deadline or (failed_at is not None and now > failed_at + 10):
                for process in processes:
                    process.kill()
            time.sleep(0.05)
        return [(process.returncode, output.result()) for process, output in zip(processes, outputs, strict=True)]


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

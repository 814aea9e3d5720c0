"""Starts the ranks of a test from nothing, as a launcher would, and ends them when they take too long."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from child_processes import QUIET, free_port

TESTS = Path(__file__).parent.parent
PATH = os.pathsep.join(map(str, (TESTS.parent / "src", TESTS, TESTS / "distributed")))


def launch(
    script: str,
    arguments: Sequence[str],
    world_size: int = 2,
    timeout: float = 600,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """Run `tests/distributed/<script>` on so many ranks; what each wrote. AssertionError where one fails or hangs."""
    common = {
        **os.environ,
        **QUIET,
        "PYTHONPATH": PATH,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        **(env or {}),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "distributed" / script), *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = _finish(processes, timeout)
    codes = [process.returncode for process in processes]
    report = "\n".join(f"[rank {rank}] {output}" for rank, output in enumerate(outputs))
    assert codes == [0] * world_size, f"ranks ended with {codes}:\n{report}"
    return outputs


def _finish(processes: Sequence[subprocess.Popen[str]], timeout: float) -> list[str]:
    """Output of each rank; those that still run at the limit, or after another failed, are ended."""
    deadline = time.monotonic() + timeout
    with ThreadPoolExecutor(len(processes)) as pool:
        outputs = [pool.submit(lambda process=process: process.communicate()[0]) for process in processes]
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                deadline = min(deadline, time.monotonic() + 10)
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
            time.sleep(0.05)
        return [output.result() for output in outputs]

"""The ranks of a measured run as processes of their own, whose memory says what it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.process import ROOT, SideError, last_object, one_thread

# Without the threshold glibc keeps freed memory in its heaps, and resident memory stays where it was.
_HONEST = {"MALLOC_MMAP_THRESHOLD_": "65536", "DS_ACCELERATOR": "cpu"}


def run_ranks(module: str, arguments: Sequence[str], world_size: int = 2, limit_s: float = 600) -> list[dict[str, Any]]:
    """What each rank of `python -m module` prints last; SideError where one fails."""
    common = {
        **one_thread(os.environ),
        **_HONEST,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=limit_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SideError(f"{module}: ranks ended with {[process.returncode for process in processes]}.")
    return [last_object(output, module) for output in outputs]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

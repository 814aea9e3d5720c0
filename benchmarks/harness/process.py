"""A measured side in a fresh process of its own: one thread, its memory watched from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_SECONDS_BETWEEN_LOOKS = 0.01
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}


class SideError(RuntimeError):
    """A measured side ended without a result."""


def run_apart(module: str, request: Mapping[str, Any], limit_s: float = 3600) -> dict[str, Any]:
    """What `python -m module REQUEST` prints last, with `peak_rss_mb`: the most memory resident while it ran.

    Memory is sampled every 10 ms and not read from the kernel's high-water mark, which a side may reset; it is None
    where there is no /proc. A side that tells its `events` (see PhaseClock) gets `peak_rss_mb_by_phase` in their place.
    SideError where the process fails or prints no JSON object.
    """
    command = [sys.executable, "-m", module, json.dumps(request)]
    process = subprocess.Popen(command, cwd=ROOT, env=one_thread(os.environ), stdout=subprocess.PIPE, text=True)
    watch = MemoryWatch(lambda: resident_bytes(process.pid))
    with watch:
        output, _ = process.communicate(timeout=limit_s)
    if process.returncode:
        raise SideError(f"{module} ended with status {process.returncode}; its messages stand above.")
    found, peak = last_object(output, module), watch.peak_bytes
    if "events" in found:
        found["peak_rss_mb_by_phase"] = peaks_by_phase(found.pop("events"), watch.samples)
    return {**found, "peak_rss_mb": None if peak is None else in_mb(peak)}


def in_mb(num_bytes: int) -> float:
    """Bytes in MiB, with one digit."""
    return round(num_bytes / 2**20, 1)


def peaks_by_phase(events: Sequence[tuple[float, str]], samples: Sequence[tuple[float, int]]) -> dict[str, float]:
    """The most MB resident in each phase: `events` are its beginnings, `samples` times with bytes, both in order."""
    starts = [when for when, _ in events]
    peaks: dict[str, int] = {}
    for when, seen in samples:
        number = bisect_right(starts, when) - 1
        if number >= 0:
            name = events[number][1]
            peaks[name] = max(seen, peaks.get(name, 0))
    return {name: in_mb(peak) for name, peak in peaks.items()}


def one_thread(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with one computing thread, the sources importable, and no talk of progress."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, **_QUIET, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)}


def last_object(output: str, module: str) -> dict[str, Any]:
    """The JSON object on the last line of what a process printed."""
    lines = output.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SideError(f"{module} ended without a JSON object on its last line.")
    return found


def resident_bytes(pid: int | str = "self", proc: Path = Path("/proc")) -> int | None:
    """Resident memory of a process now; None once it is gone, or where there is no /proc."""
    try:
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return None


class MemoryWatch:
    """Samples `read` in a thread while the context is open; `peak_bytes` is the most that was seen.

    `samples` are the looks at it, with the time of the system's monotonic clock.
    """

    def __init__(self, read: Callable[[], int | None]) -> None:
        self.peak_bytes: int | None = None
        self.samples: list[tuple[float, int]] = []
        self._read = read
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            seen = self._read()
            if seen is not None:
                self.peak_bytes = max(seen, self.peak_bytes or 0)
                self.samples.append((time.monotonic(), seen))
            if self._done.wait(_SECONDS_BETWEEN_LOOKS):
                return

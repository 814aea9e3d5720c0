"""Whether processes that a test knows by number have ended; one that nobody has waited for yet has."""

from __future__ import annotations

import time
from pathlib import Path


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def are_gone(pids, seconds):
    """Whether all of them have ended, within so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(is_alive(pid) for pid in pids):
        time.sleep(0.05)
    return not any(is_alive(pid) for pid in pids)

"""The record of smaller sizes, in output_dir, of a run that an out-of-memory error has ended.

A failing rank writes the record. The launcher starts the ranks again if the record is new, and the restarted run applies it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIZES_FILE = ".lowpeak.sizes.json"


def record_sizes(output_dir: Path, phase: str, reason: str, sizes: Mapping[str, Any], process_index: int) -> None:
    """Write the sizes for the restarted run; several processes may call it at the same time."""
    output_dir.mkdir(parents=True, exist_ok=True)
    # The time tells the launcher this record from an equal one of an earlier launch.
    record = {"phase": phase, "reason": reason, "sizes": dict(sizes), "time": time.time()}
    partial = output_dir / f"{SIZES_FILE}.{process_index}"
    partial.write_text(json.dumps(record), encoding="utf-8")
    partial.replace(output_dir / SIZES_FILE)


def read_sizes(output_dir: Path) -> dict[str, Any]:
    """Return the record; an empty one if there is none."""
    try:
        record: dict[str, Any] = json.loads((output_dir / SIZES_FILE).read_text(encoding="utf-8"))
    except OSError:
        return {}
    return record


def take_sizes(output_dir: Path) -> dict[str, Any]:
    """Return the record and remove it."""
    record = read_sizes(output_dir)
    (output_dir / SIZES_FILE).unlink(missing_ok=True)
    return record

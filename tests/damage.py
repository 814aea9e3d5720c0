"""Damage to files, as disks and interrupted copies do it."""

from __future__ import annotations

from pathlib import Path

DAMAGES = ("removed", "emptied", "truncated", "flipped", "zeroed")


def harm(file: Path, damage: str) -> bool:
    """Damage a file; whether that changed it."""
    before = file.read_bytes()
    middle = len(before) // 2
    if damage == "removed":
        file.unlink()
        return True
    after = {
        "emptied": b"",
        "truncated": before[: len(before) * 2 // 3],
        "flipped": before[:middle] + bytes(byte ^ 4 for byte in before[middle : middle + 1]) + before[middle + 1 :],
        "zeroed": before[:middle] + bytes(min(64, len(before) - middle)) + before[middle + 64 :],
    }[damage]
    file.write_bytes(after)
    return after != before

"""Damage to files, as disks and interrupted copies do it; and manifests of checkpoints that a test has changed."""

from __future__ import annotations

from pathlib import Path

from lowpeak.checkpoint.manifest import MANIFEST_FILE, digest_files, write_manifest
from lowpeak.ranks import Ranks

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


def sign_again(checkpoint: Path) -> None:
    """Write the manifest of a changed checkpoint, as who can write into the folder can."""
    (checkpoint / MANIFEST_FILE).unlink()
    write_manifest(checkpoint, [digest_files(checkpoint, Ranks())])

"""The lock of a run's output folder: one run at a time writes into it.

Two runs would mix their journals and remove each other's checkpoints.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowpeak.errors import CheckpointError

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lowpeak.lock"
_PID_BYTES = 20


@contextmanager
def lock_run_folder(run_dir: Path) -> Iterator[None]:
    """Lock a folder during the block; raise CheckpointError if another process has locked it.

    The lock is the kernel's, on an open file, so a killed run releases it. On a system without such locks nothing is locked.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK_FILE
    try:
        file = open_without_symlink(path, os.O_RDWR | os.O_CREAT)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened ({error.strerror}). Remove it, or choose another output_dir."
        ) from error
    try:
        _lock(file, run_dir)
        yield
    finally:
        os.close(file)


def open_without_symlink(path: Path, flags: int) -> int:
    """Open a file as `os.open` does; raise CheckpointError for a symbolic link."""
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CheckpointError(
            f"{path} is a symbolic link, so another file could be overwritten. Remove the link."
        ) from error


def _lock(file: int, run_dir: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(file, _PID_BYTES).decode(errors="replace").strip() or "unknown"
        raise CheckpointError(
            f"another run (process {holder}) is writing into {run_dir}. Wait for it, stop it, or choose another output_dir."
        ) from error
    except OSError:
        return
    os.pwrite(file, str(os.getpid()).ljust(_PID_BYTES).encode(), 0)

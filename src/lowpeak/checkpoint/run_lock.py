"""One run at a time writes into a folder: two would double each other's journal and remove each other's checkpoints."""

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
def only_run(run_dir: Path) -> Iterator[None]:
    """Hold the folder for the block; CheckpointError naming the process that holds it. A killed run holds nothing.

    The lock is the kernel's, on an open file; a system without such locks is used unguarded.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK_FILE
    try:
        file = open_no_link(path, os.O_RDWR | os.O_CREAT)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened ({error.strerror}): remove it, or choose another output_dir."
        ) from error
    try:
        _take(file, run_dir)
        yield
    finally:
        os.close(file)


def open_no_link(path: Path, flags: int) -> int:
    """`os.open`; CheckpointError for a symbolic link."""
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CheckpointError(
            f"{path} is a symbolic link, through which another file could be written: remove the link."
        ) from error


def _take(file: int, run_dir: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(file, _PID_BYTES).decode(errors="replace").strip() or "unknown"
        raise CheckpointError(
            f"another run (process {holder}) is writing into {run_dir}: wait for it, stop it, or choose another output_dir."
        ) from error
    except OSError:
        return
    os.pwrite(file, str(os.getpid()).ljust(_PID_BYTES).encode(), 0)

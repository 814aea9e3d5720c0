"""One run at a time in one folder: two would take each other's checkpoints away and mix their journals."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowpeak.errors import CheckpointError

_TAKEN = (errno.EACCES, errno.EAGAIN)


@contextmanager
def occupied(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir` against other processes; CheckpointError where one holds it. The hold ends with the process.

    The same process may hold a folder twice (POSIX record locks). Where the system or the disk has no locks, nothing
    is held.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder = run_dir / "journal"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as handle:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                raise CheckpointError(
                    f"another run is writing into {run_dir}: wait until it ends, or name another output_dir."
                ) from error
        yield

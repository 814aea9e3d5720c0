"""The output folder of a run: its lock, and its checkpoints, which are found, pruned and cleaned up.

`transformers.Trainer` writes `checkpoint-N` in place and removes old ones first, so a killed run may leave one incomplete
checkpoint and no other. Here a folder's name shows its state:

    checkpoint-N.staged     incomplete: being written
    checkpoint-N            complete
    checkpoint-N.replaced   complete: renamed while a new checkpoint of the same step takes its name
    checkpoint-N.removing   incomplete: being deleted

A kill at any moment leaves folders in these states; `clean_up_checkpoints` completes or removes them when the run starts again.

One run at a time writes into the folder: two would mix their journals and remove each other's checkpoints."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from lowpeak.errors import ArgumentError, CheckpointError

logger = logging.getLogger(__name__)

STATE_FILE = "lowpeak_state.json"
_COMPLETE = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"(checkpoint-\d+)\.(staged|replaced|removing)")


def last_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint of the highest step in `run_dir`, or None.

    A folder without lowpeak's state, such as a partial copy, counts only if no other folder has it.
    """
    folders = complete_checkpoints(run_dir)[::-1]
    return next((folder for folder in folders if (folder / STATE_FILE).is_file()), next(iter(folders), None))


def prune_checkpoints(run_dir: Path, keep: int | None, protect: Collection[Path] = ()) -> None:
    """Remove the oldest checkpoints until `keep` are left; None or less than 1 keeps all, as in transformers.

    The newest one and those in `protect` (the best one) are never removed.
    """
    if keep is None or keep < 1:
        return
    checkpoints = complete_checkpoints(run_dir)
    protected = {path.resolve() for path in protect}
    removable = [path for path in checkpoints[:-1] if path.resolve() not in protected]
    for checkpoint in removable[: max(0, len(checkpoints) - keep)]:
        removing = in_state(checkpoint, "removing")
        try:
            delete_folder(removing)
            os.replace(checkpoint, removing)
            # The new name must be on the disk before the first file is deleted.
            fsync_path(run_dir)
            delete_folder(removing)
        except OSError as error:
            raise CheckpointError(
                f"cannot remove the old checkpoint {checkpoint}: {error.strerror}; no checkpoint is damaged. Make the folder "
                "writable, or raise save_total_limit."
            ) from error


def move_later_checkpoints(run_dir: Path, after: int) -> Path | None:
    """Move checkpoints of later steps than `after` into a new folder `earlier-K`.

    Returns the folder, or None if there are no such checkpoints. Another run wrote them. Otherwise a run that starts
    new or resumes from an earlier step could take one for its last checkpoint.
    """
    others = [path for path in complete_checkpoints(run_dir) if int(path.name.rpartition("-")[2]) > after]
    if not others:
        return None
    folders = (run_dir / f"earlier-{number}" for number in itertools.count(1))
    folder = next(folder for folder in folders if not folder.exists())
    folder.mkdir()
    for path in others:
        path.rename(folder / path.name)
    return folder


def clean_up_checkpoints(run_dir: Path) -> None:
    """Remove incomplete folders of a killed run, and give a replaced checkpoint its name back.

    Call it on one rank, before `last_checkpoint`, while no run saves into `run_dir`.
    """
    if not run_dir.is_dir():
        return
    for name in {match[1] for path in run_dir.iterdir() if (match := _LEFTOVER.fullmatch(path.name))}:
        finish_interrupted(run_dir / name)


def check_writable(output_dir: Path) -> None:
    """Raise ArgumentError unless `output_dir` can be created and written."""
    # Write a temporary file: root passes every permission check, also on a read-only disk.
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir) as probe:
            probe.write(b"\0")
            probe.flush()
    except OSError as error:
        raise ArgumentError(
            f"output_dir '{output_dir}' cannot be written: {error.strerror}. Choose a folder that can be created and written, on "
            "a disk with free space."
        ) from error


def resolve_checkpoint(run_dir: Path, resume_from_checkpoint: bool | str | os.PathLike[str] | None) -> Path | None:
    """Return the checkpoint to resume from, or None.

    None and False mean no checkpoint, True the last one of `run_dir`, anything else is a path. Call
    `clean_up_checkpoints` first. Raises CheckpointError if there is none, or if it is not lowpeak's.
    """
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
        return None
    last = last_checkpoint(run_dir)
    if resume_from_checkpoint is True:
        if last is None:
            raise CheckpointError(
                f"resume_from_checkpoint=True, but {run_dir} has no complete checkpoint-N. Start without it, or set it to the "
                "checkpoint's folder."
            )
        _check_is_checkpoint(last, None)
        return last
    if not isinstance(resume_from_checkpoint, str | os.PathLike):
        raise CheckpointError(
            f"resume_from_checkpoint must be 'auto', True, False, None or a checkpoint's folder, got {resume_from_checkpoint!r}."
        )
    _check_is_checkpoint(Path(resume_from_checkpoint), last)
    return Path(resume_from_checkpoint)


def _check_is_checkpoint(folder: Path, last: Path | None) -> None:
    """Raise CheckpointError if `folder` is no complete checkpoint of lowpeak; name `last`, the run's last one, as a remedy."""
    hint = f"The last one of this run is {last}." if last else "Set it to a checkpoint-N folder of a lowpeak run."
    if not folder.is_dir():
        reason = "is not an existing folder"
    elif folder.suffix in (".staged", ".removing"):
        reason = "is incomplete: its run was killed"
    elif not (folder / STATE_FILE).is_file():
        reason, inside = f"has no {STATE_FILE} of a lowpeak run", last_checkpoint(folder)
        hint = f"Did you mean {inside}?" if inside else hint
    else:
        return
    raise CheckpointError(f"resume_from_checkpoint: {folder} {reason}. {hint}")


def in_state(folder: Path, state: str) -> Path:
    """Return the name that a checkpoint folder has in a state: staged, replaced or removing."""
    return folder.with_name(f"{folder.name}.{state}")


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders `checkpoint-N` of `run_dir` by their step, also those that lowpeak did not write."""
    if not run_dir.is_dir():
        return []
    steps = {int(match[1]): path for path in run_dir.iterdir() if (match := _COMPLETE.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps) if steps[step].is_dir()]


def finish_interrupted(final: Path) -> None:
    """Complete or undo an interrupted write or removal: afterwards only `final` may exist, complete."""
    delete_folder(in_state(final, "staged"))
    replaced, removing = in_state(final, "replaced"), in_state(final, "removing")
    if replaced.exists() and not final.exists():
        os.replace(replaced, final)
        fsync_path(final.parent)
    elif replaced.exists():
        delete_folder(removing)
        os.replace(replaced, removing)
    delete_folder(removing)


def delete_folder(folder: Path) -> None:
    """Delete an incomplete folder; log a warning if that fails, since a run need not stop for it."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        logger.warning(
            "%s could not be removed (%s). It is an incomplete checkpoint or export: delete it by hand.",
            folder,
            error.strerror,
        )


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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

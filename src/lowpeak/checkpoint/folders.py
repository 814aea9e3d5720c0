"""Checkpoint folders of a run: their names while they are written, replaced and removed, and how they are found.

`transformers.Trainer` writes `checkpoint-N` in place and removes old ones first, so a run killed meanwhile can leave
half a checkpoint under the newest name and nothing else. Here a folder has its whole name only while it is whole:

    checkpoint-N.staged     being written; not yet a checkpoint
    checkpoint-N            whole
    checkpoint-N.replaced   whole, moved aside while a new checkpoint of the same step takes its name
    checkpoint-N.removing   no longer a checkpoint; being deleted

A kill at any moment leaves one of these states, and `sweep` ends what it cut off.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from lowpeak.errors import ArgumentError, CheckpointError

logger = logging.getLogger(__name__)

STATE_FILE = "lowpeak_state.json"
_WHOLE = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"(checkpoint-\d+)\.(staged|replaced|removing)")


def last_checkpoint(run_dir: Path) -> Path | None:
    """Return the whole checkpoint of the highest step in `run_dir`, or None; leftovers of killed runs do not count."""
    return next(reversed(_whole_checkpoints(run_dir)), None)


def prune(run_dir: Path, keep: int | None, protect: Collection[Path] = ()) -> None:
    """Remove the oldest checkpoints until `keep` are left; None or less than one keeps all, as in transformers.

    The newest and those in `protect` (the best one) are never removed. Each loses its name before its files.
    """
    if keep is None or keep < 1:
        return
    whole = _whole_checkpoints(run_dir)
    kept = {path.resolve() for path in protect}
    removable = [path for path in whole[:-1] if path.resolve() not in kept]
    for checkpoint in removable[: max(0, len(whole) - keep)]:
        removing = sibling(checkpoint, "removing")
        try:
            delete_folder(removing)
            os.replace(checkpoint, removing)
            sync(run_dir)  # the name is gone from the disk, too, before any file is
            delete_folder(removing)
        except OSError as error:
            message = f"cannot remove the old checkpoint {checkpoint}: {error.strerror}; all checkpoints are whole"
            raise CheckpointError(f"{message}. Make the folder writable, or raise save_total_limit.") from error


def set_aside(run_dir: Path, after: int) -> Path | None:
    """Move checkpoints beyond step `after`, which another run wrote, into a folder `earlier-K`; None where there are none.

    A run that starts anew or goes on from further back would else mix with them: "the last checkpoint" could be theirs.
    """
    others = [path for path in _whole_checkpoints(run_dir) if int(path.name.rpartition("-")[2]) > after]
    if not others:
        return None
    folders = (run_dir / f"earlier-{number}" for number in itertools.count(1))
    folder = next(folder for folder in folders if not folder.exists())
    folder.mkdir()
    for path in others:
        path.rename(folder / path.name)
    return folder


def sweep(run_dir: Path) -> None:
    """End what a killed run left: stages and half removed checkpoints go, a checkpoint moved aside gets its name back.

    Call it on one rank, before `last_checkpoint` is asked and while nobody saves into `run_dir`.
    """
    if not run_dir.is_dir():
        return
    for name in {match[1] for path in run_dir.iterdir() if (match := _LEFTOVER.fullmatch(path.name))}:
        finish_interrupted(run_dir / name)


def check_writable(output_dir: Path) -> None:
    """Make `output_dir` and write a file there that vanishes again; `ArgumentError` where that is not possible.

    It tries instead of asking, because root passes every permission check and still cannot write a read-only disk.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir) as probe:
            probe.write(b"\0")
            probe.flush()
    except OSError as error:
        message = f"output_dir '{output_dir}' cannot be written: {error.strerror}"
        raise ArgumentError(f"{message}; name a folder that can be made and written, on a disk with space.") from error


def find_resume(run_dir: Path, resume_from_checkpoint: bool | str | os.PathLike[str] | None) -> Path | None:
    """Return the checkpoint to go on from: None and False name none, True the last whole one of `run_dir`, a path itself.

    `sweep(run_dir)` comes first. Raises `CheckpointError` where there is none, or where it is not lowpeak's.
    """
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
        return None
    last = last_checkpoint(run_dir)
    if resume_from_checkpoint is True:
        if last is None:
            raise CheckpointError(
                f"resume_from_checkpoint=True, but {run_dir} holds no whole checkpoint-N; start without it, "
                "or name the checkpoint's folder."
            )
        checkpoint, last = last, None
    else:
        checkpoint = Path(resume_from_checkpoint)
    hint = f"the last one of this run is {last}." if last else "name a checkpoint-N folder of a lowpeak run."
    if not checkpoint.is_dir():
        reason = "is not a folder that exists"
    elif checkpoint.suffix in (".staged", ".removing"):
        reason = "is what a killed run left half written"
    elif not (checkpoint / STATE_FILE).is_file():
        reason, inside = "holds no state of a lowpeak run", last_checkpoint(checkpoint)
        hint = f"did you mean {inside}?" if inside else hint
    else:
        return checkpoint
    raise CheckpointError(f"resume_from_checkpoint: {checkpoint} {reason}; {hint}")


def sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{suffix}")


def _whole_checkpoints(run_dir: Path) -> list[Path]:
    if not run_dir.is_dir():
        return []
    steps = {int(match[1]): path for path in run_dir.iterdir() if (match := _WHOLE.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps) if steps[step].is_dir()]


def finish_interrupted(final: Path) -> None:
    """Bring `final` and its leftovers to rest: `final` is whole or absent, and nothing lies beside it."""
    delete_folder(sibling(final, "staged"))
    replaced, removing = sibling(final, "replaced"), sibling(final, "removing")
    if replaced.exists() and not final.exists():
        os.replace(replaced, final)
        sync(final.parent)
    elif replaced.exists():
        delete_folder(removing)
        os.replace(replaced, removing)
    delete_folder(removing)


def delete_folder(folder: Path) -> None:
    """Delete a folder that has no whole name; what resists is left for the next `sweep`, a run need not end for it."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        logger.warning(
            "%s could not be removed (%s). It is left over from an unfinished write or removal: delete it by hand.",
            folder,
            error.strerror,
        )


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

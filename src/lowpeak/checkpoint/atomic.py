"""Atomic writes: a checkpoint is complete under its name or absent, whenever a run is killed.

A checkpoint's folder is written as a *stage* under another name (see `folders`), flushed to the disk, and renamed. Only then
are older checkpoints removed. An exported model (`save_model`) shares its folder with other files, so its files are staged and
renamed one by one.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lowpeak.checkpoint.folders import delete_folder, finish_interrupted, fsync_path, in_state, last_checkpoint
from lowpeak.checkpoint.manifest import digest_files, write_manifest
from lowpeak.errors import CheckpointError, LowpeakError

if TYPE_CHECKING:
    from lowpeak.ranks import Ranks

logger = logging.getLogger(__name__)

_EXPORT_STAGE = ".lowpeak.export"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_OS_ERROR = re.compile(r"os error (\d+)")  # how safetensors reports errno
_TORCH_WRITER = ("inline_container", "iostream error", "PytorchStreamWriter")  # how torch.save fails, without errno


@contextmanager
def stage_checkpoint(final: Path, ranks: Ranks) -> Iterator[Path]:
    """Yield an empty folder that becomes `final` when the block has succeeded on all ranks.

    A manifest is added. All ranks write into the same folder. Rank 0 creates it, and renames it after every rank has
    flushed it to the disk; an existing `final` is replaced. After an error on any rank the stage is deleted. Errors of
    the operating system, also those that torch or safetensors wrap, are raised as CheckpointError on all ranks.
    """
    first, stage = ranks.rank == 0, in_state(final, "staged")
    step = partial(_step, ranks, stage, partial(_failure_message, final))
    try:
        with step():
            if first:
                finish_interrupted(final)
                stage.mkdir(parents=True)
        with step():
            yield stage
        with step():
            entries = digest_files(stage, ranks)
        shares = ranks.gather(entries)
        with step():
            if first:
                write_manifest(stage, shares)
            _sync_folder(stage)
        with step():
            if first:
                _give_name(stage, final)
    except BaseException:
        if first:
            delete_folder(stage)
        raise


@contextmanager
def stage_files(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Yield an empty folder whose files replace `folder`'s, one by one, when the block ends.

    A single file of weights is replaced by one rename. With several, the old index is removed first and the new one written
    last, so a kill in between leaves a model that does not load, never a mixture of two exports. Errors of the operating system
    are raised as CheckpointError on all ranks.
    """
    first, stage = ranks.rank == 0, folder / _EXPORT_STAGE

    def failure(reason: str) -> str:
        remedy = "Free disk space, check the permissions, or choose another folder."
        return f"cannot write the model into {folder}: {reason}. {remedy}"

    step = partial(_step, ranks, stage, failure)
    try:
        with step():
            if first:
                delete_folder(stage)
                stage.mkdir(parents=True)
        with step():
            yield stage
        with step():
            if first:
                _sync_folder(stage)
                _replace_files(stage, folder)
    finally:
        if first:
            delete_folder(stage)


def _remove_other_shards(folder: Path, names: Collection[Path]) -> None:
    """Remove the index and the shards of an earlier export that are not among `names`."""
    earlier = {path.relative_to(folder) for path in folder.glob("model-*-of-*.safetensors")} | {Path(_INDEX)}
    for name in earlier.difference(names):
        (folder / name).unlink(missing_ok=True)


def _replace_files(stage: Path, folder: Path) -> None:
    """Move a stage's files into `folder`, the weights' index last, and remove an earlier export's weights and adapter."""
    names = sorted(path.relative_to(stage) for path in stage.rglob("*") if path.is_file())
    names.sort(key=lambda name: name.name == _INDEX)
    is_full_model = Path(_WEIGHTS) in names or Path(_INDEX) in names
    # from_pretrained would apply an old adapter to the new weights. Without an index the weights do not load.
    for name in (*(_ADAPTER if is_full_model else ()), *((_INDEX, _WEIGHTS) if Path(_INDEX) in names else ())):
        (folder / name).unlink(missing_ok=True)
    fsync_path(folder)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / name, folder / name)
    if is_full_model:
        _remove_other_shards(folder, names)
    fsync_path(folder)
    if not is_full_model and Path(_ADAPTER[0]) in names:
        _warn_of_other_base(folder)


def _warn_of_other_base(folder: Path) -> None:
    """Warn if `from_pretrained` would apply the adapter in `folder` to the full model there, and not to its base."""
    if not (folder / "config.json").exists():
        return
    base = json.loads((folder / _ADAPTER[0]).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if base is None or Path(base).resolve() != folder.resolve():
        logger.warning(
            "%s also contains a full model, and from_pretrained would use that as the base of the adapter saved there, "
            "instead of %s. Remove that model's config.json and weights, or save the adapter into another folder.",
            folder,
            base,
        )


@contextmanager
def _step(ranks: Ranks, stage: Path, failure: Callable[[str], str]) -> Iterator[None]:
    """Raise an error of the block on all ranks; an error of the operating system as CheckpointError(failure(reason))."""
    with ranks.propagate_errors():
        try:
            yield
        except LowpeakError:
            raise
        except Exception as error:
            reason = _os_reason(error, stage)
            if reason is None:
                raise
            raise CheckpointError(failure(reason)) from error


def _give_name(stage: Path, final: Path) -> None:
    """Rename a flushed stage to `final`; an older `final` is renamed first, and deleted last."""
    replaced = in_state(final, "replaced")
    if final.exists():
        os.replace(final, replaced)
    try:
        os.replace(stage, final)
    except BaseException:
        if replaced.exists():
            os.replace(replaced, final)
        raise
    fsync_path(final.parent)
    finish_interrupted(final)


def _sync_folder(folder: Path) -> None:
    """Flush a folder, and all files and folders below it, to the disk."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            fsync_path(Path(parent, name))
        fsync_path(Path(parent))


def _failure_message(final: Path, reason: str) -> str:
    last = last_checkpoint(final.parent)
    state = f"the last checkpoint {last} is complete" if last else "there is no earlier checkpoint"
    resume = f", and resume from {last}" if last else ""
    remedy = f"Free disk space (save_total_limit keeps fewer checkpoints) or choose another output_dir{resume}."
    return f"cannot save the checkpoint {final}: {reason}; {state}. {remedy}"


def _os_reason(error: BaseException, stage: Path) -> str | None:
    """Return the operating system's reason if `error` comes from writing, else None.

    torch.save raises RuntimeErrors, which may have an OSError as their cause; safetensors writes errno into its message.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if match := _OS_ERROR.search(str(error)):
        return os.strerror(int(match[1]))
    if not isinstance(error, RuntimeError) or not any(sign in str(error) for sign in _TORCH_WRITER):
        return None
    return _reason_of_cause(error) or _retry_write(stage) or f"torch could not write a file ({error})"


def _reason_of_cause(error: BaseException) -> str | None:
    """Return the reason of the first OSError among the causes of `error`."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return None if cause is None else cause.strerror


def _retry_write(stage: Path) -> str | None:
    """Return the reason of a failed write whose errno is lost, by appending to the stage's largest file."""
    sizes = {path: path.stat().st_size for path in stage.rglob("*") if not path.is_dir()}
    if not sizes:
        return None
    try:
        with max(sizes, key=sizes.__getitem__).open("ab") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    return None

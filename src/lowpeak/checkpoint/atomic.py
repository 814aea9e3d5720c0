"""Checkpoints that are whole or not there: staged, synced, renamed, and only then are old ones removed.

`transformers.Trainer` writes `checkpoint-N` in place and removes old ones first, so a run killed meanwhile can leave
half a checkpoint under the newest name and nothing else. Here a folder has its whole name only while it is whole:

    checkpoint-N.staged     being written; not yet a checkpoint
    checkpoint-N            whole
    checkpoint-N.replaced   whole, moved aside while a new checkpoint of the same step takes its name
    checkpoint-N.removing   no longer a checkpoint; being deleted

A kill at any moment leaves one of these states, and `sweep` ends what it cut off.

An exported model (`save_model`) shares its folder with other files, so its files are staged and take their places one by one.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lowpeak.checkpoint.folders import delete_folder, finish_interrupted, last_checkpoint, sibling, sync
from lowpeak.checkpoint.manifest import digest_share, write_manifest
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
def staged(final: Path, ranks: Ranks | None = None) -> Iterator[Path]:
    """Yield a fresh folder that becomes `final` when the block ends, whole, with a manifest and synced, or not at all.

    All ranks write into the one folder; rank 0 makes it and gives it its name, when every rank has written and synced. A
    whole `final` from before is replaced. An exception on any rank removes the stage; one from the operating system,
    whether it came through Python, torch or safetensors, is raised as `CheckpointError` on every rank, with its reason and
    what is left.
    """
    first, stage = ranks is None or ranks.rank == 0, sibling(final, "staged")
    part = partial(_part, ranks, stage, partial(_failure, final))
    try:
        with part():
            if first:
                finish_interrupted(final)
                stage.mkdir(parents=True)
        with part():
            yield stage
        with part():
            entries = digest_share(stage, ranks)
        shares = [entries] if ranks is None else ranks.gather(entries)
        with part():
            if first:
                write_manifest(stage, shares)
            _sync_tree(stage)
        with part():
            if first:
                _give_name(stage, final)
    except BaseException:
        if first:
            delete_folder(stage)
        raise


@contextmanager
def staged_files(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Yield a fresh folder whose files replace those of `folder` one by one when the block ends, synced to the disk.

    A single file of weights replaces another in one rename. With several, the index goes first and comes last: a kill
    between leaves no model that loads, and never a mixture of two exports. An error of the operating system is a
    `CheckpointError` on every rank.
    """
    first, stage = ranks.rank == 0, folder / _EXPORT_STAGE

    def failure(reason: str) -> str:
        remedy = "Free disk space, check the permissions, or choose another folder."
        return f"cannot write the model into {folder}: {reason}. {remedy}"

    part = partial(_part, ranks, stage, failure)
    try:
        with part():
            if first:
                delete_folder(stage)
                stage.mkdir(parents=True)
        with part():
            yield stage
        with part():
            if first:
                _sync_tree(stage)
                _replace_files(stage, folder)
    finally:
        if first:
            delete_folder(stage)


def _replace_files(stage: Path, folder: Path) -> None:
    """Give a stage's files their places, the index of weights last; an earlier export's weights and adapter go."""
    names = sorted(path.relative_to(stage) for path in stage.rglob("*") if path.is_file())
    names.sort(key=lambda name: name.name == _INDEX)
    is_whole = Path(_WEIGHTS) in names or Path(_INDEX) in names
    # from_pretrained would put an old adapter on the new weights; without an index nothing loads until the new one is there.
    for name in (*(_ADAPTER if is_whole else ()), *((_INDEX, _WEIGHTS) if Path(_INDEX) in names else ())):
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / name, folder / name)
    if is_whole:
        for path in (*folder.glob("model-*-of-*.safetensors"), folder / _INDEX):
            if path.relative_to(folder) not in names:
                path.unlink(missing_ok=True)
    sync(folder)
    if not is_whole and Path(_ADAPTER[0]) in names and (folder / "config.json").exists():
        base = json.loads((folder / _ADAPTER[0]).read_text(encoding="utf-8")).get("base_model_name_or_path")
        if base is None or Path(base).resolve() != folder.resolve():
            logger.warning(
                "%s also holds a whole model, which from_pretrained takes as the base of the adapter saved there now, in place "
                "of %s: remove that model's config.json and weights, or save the adapter into another folder.",
                folder,
                base,
            )


@contextmanager
def _part(ranks: Ranks | None, stage: Path, failure: Callable[[str], str]) -> Iterator[None]:
    """Fail on all ranks together; an error of the operating system is a CheckpointError, the `failure` of its reason."""
    with nullcontext() if ranks is None else ranks.together():
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
    """Rename a synced stage to `final`; what had the name before is moved aside first, and deleted last."""
    replaced = sibling(final, "replaced")
    if final.exists():
        os.replace(final, replaced)
    try:
        os.replace(stage, final)
    except BaseException:
        if replaced.exists():
            os.replace(replaced, final)
        raise
    sync(final.parent)
    finish_interrupted(final)


def _sync_tree(folder: Path) -> None:
    """Wait until every file and folder below `folder`, itself included, is on the disk."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


def _failure(final: Path, reason: str) -> str:
    last = last_checkpoint(final.parent)
    left = f"the last good checkpoint {last} is whole" if last else "no earlier checkpoint is there"
    resume = f" and resume from {last}" if last else ""
    remedy = f"make room or choose another output_dir (save_total_limit keeps fewer checkpoints){resume}"
    return f"cannot save the checkpoint {final}: {reason}; {left}. To go on, {remedy}."


def _os_reason(error: BaseException, stage: Path) -> str | None:
    """Return what the operating system said when `error` comes from writing, else None.

    torch.save raises RuntimeErrors that may have an OSError behind them, safetensors writes errno into its sentence.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if match := _OS_ERROR.search(str(error)):
        return os.strerror(int(match[1]))
    if not isinstance(error, RuntimeError) or not any(sign in str(error) for sign in _TORCH_WRITER):
        return None
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    told = None if behind is None else behind.strerror
    return told or _provoke(stage) or f"torch could not write a file ({error})"


def _provoke(stage: Path) -> str | None:
    """Return the reason of a failed write that lost its errno: the largest file of the stage is the one that cannot grow."""
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

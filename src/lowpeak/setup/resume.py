"""The checkpoint that a run resumes from, and an output folder without later or foreign checkpoints."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowpeak.checkpoint import (
    clean_up_checkpoints,
    complete_checkpoints,
    last_checkpoint,
    move_later_checkpoints,
    resolve_checkpoint,
    verify_manifest,
)
from lowpeak.errors import CheckpointError
from lowpeak.journal import Journal
from lowpeak.ranks import Ranks
from lowpeak.setup.elastic_restart import is_of_this_launch, num_restarts, record_launch

logger = logging.getLogger(__name__)

AUTO = "auto"  # resume from the last undamaged checkpoint if there is one, else start a new run


def find_resume_checkpoints(args: Any, argument: str | bool | None = None) -> tuple[bool, list[Path]]:
    """Remove partial checkpoints of a killed run, and return those to resume from; one process calls it.

    `argument` is that of train(). The result says whether AUTO acts: then it has all complete checkpoints, the newest first, else
    one or none, after a restart (`num_restarts`) the last one of the same launch, if there is one.
    """
    output_dir, requested, restarts = Path(args.output_dir), _requested(args, argument), num_restarts()
    clean_up_checkpoints(output_dir)
    if requested == AUTO:
        return True, complete_checkpoints(output_dir)[::-1]
    last = last_checkpoint(output_dir)
    if restarts and last is not None and is_of_this_launch(last):
        logger.warning("Restart %d: resuming from %s.", restarts, last)
        requested = True
    checkpoint = resolve_checkpoint(output_dir, requested)
    return False, [] if checkpoint is None else [checkpoint]


def _requested(args: Any, argument: str | bool | None = None) -> Any:
    """Return AUTO, True, None or a path: the `argument` of train(), or the config's if that is None."""
    value = args.resume_from_checkpoint if argument is None else argument
    return {"auto": AUTO, "true": True, "false": None, "none": None}.get(str(value).lower(), value)


def choose_undamaged(checkpoints: Sequence[Path], ranks: Ranks) -> Path | None:
    """Return the first undamaged checkpoint or None; raise CheckpointError if all are damaged."""
    for number, checkpoint in enumerate(checkpoints, 1):
        try:
            verify_manifest(checkpoint, ranks)
        except CheckpointError as error:
            if number == len(checkpoints):
                several = f"all {number} checkpoints in {checkpoint.parent} are damaged: " if number > 1 else ""
                raise CheckpointError(f"{several}{error}") from error
            logger.warning("%s is not used, and an older checkpoint is tried: %s", checkpoint, error)
        else:
            return checkpoint
    return None


def check_resume(args: Any) -> None:
    """Raise CheckpointError if the requested checkpoint does not exist; a restarted run finds its checkpoint itself."""
    if (requested := _requested(args)) != AUTO and not num_restarts():
        resolve_checkpoint(Path(args.output_dir), requested)


def check_checkpoint_name(checkpoint: Path, output_dir: Path, step: int) -> None:
    """Raise CheckpointError for a checkpoint in `output_dir` whose name is of another step than its state."""
    path = checkpoint.resolve()
    is_named = path.parent == output_dir.resolve() and re.fullmatch(r"checkpoint-\d+", path.name)
    if is_named and path.name != f"checkpoint-{step}":
        raise CheckpointError(
            f"{checkpoint} has the state of step {step}, which its name contradicts: rename it to checkpoint-{step}, or "
            f"move it out of {output_dir}."
        )


def clear_output_dir(output_dir: Path, journal: Journal, step: int | None) -> None:
    """Move away checkpoints of another run, or of steps after a resumed run's `step`; one process calls it.

    The journal then loses the same steps, and has an event for the resume.
    """
    moved_to = move_later_checkpoints(output_dir, step or 0)
    if moved_to is not None:
        logger.warning("%s had later checkpoints, or those of another run; they are now in %s.", output_dir, moved_to)
    if step is not None:
        journal.resume_at(step)
    else:
        journal.begin_files()
    if step is not None or num_restarts():
        journal.write_event(step or 0, "resumed", restarts=num_restarts())
    record_launch(output_dir, step or 0)

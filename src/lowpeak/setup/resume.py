"""The checkpoint that a run resumes from, and an output folder without later or foreign checkpoints."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from lowpeak.arguments import EffectReport
from lowpeak.checkpoint import clean_up_checkpoints, last_checkpoint, move_later_checkpoints, resolve_checkpoint
from lowpeak.errors import CheckpointError
from lowpeak.journal import Journal
from lowpeak.setup.elastic_restart import is_of_this_launch, num_restarts, record_launch

logger = logging.getLogger(__name__)


def find_resume_checkpoint(
    output_dir: Path, resume_from_checkpoint: str | bool | None, args: Any = None
) -> Path | None:
    """Remove partial checkpoints of a killed run, and return the checkpoint to resume from; one process calls it.

    After a restart (`num_restarts`) that is the last complete checkpoint of the same launch, if
    there is one, whatever the arguments are. Warns, or raises with strict_arguments, if only the argument in `args` asks to resume.
    """
    argument = getattr(args, "resume_from_checkpoint", None)
    if resume_from_checkpoint is None and str(argument).lower() not in ("none", "false"):
        effects = EffectReport(args)
        effects.add(f"resume_from_checkpoint={argument!r}", "only train(resume_from_checkpoint=...) resumes a run")
        effects.report()
    clean_up_checkpoints(output_dir)
    restarts = num_restarts()
    last = last_checkpoint(output_dir)
    if restarts and last is not None and is_of_this_launch(last):
        logger.warning("Restart %d: resuming from %s.", restarts, last)
        return resolve_checkpoint(output_dir, True)
    return resolve_checkpoint(output_dir, resume_from_checkpoint)


def check_resume(output_dir: Path, resume_from_checkpoint: str | bool | None) -> None:
    """Raise CheckpointError if there is no such checkpoint; a restarted run finds its checkpoint itself."""
    if not num_restarts():
        resolve_checkpoint(output_dir, resume_from_checkpoint)


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
    if step is not None or num_restarts():
        journal.write_event(step or 0, "resumed", restarts=num_restarts())
    record_launch(output_dir, step or 0)

"""How a run starts on several ranks: who logs, which checkpoint all go on from, what an earlier run left."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from lowpeak.checkpoint.atomic import last_checkpoint, set_aside, sweep
from lowpeak.checkpoint.resume import find_resume

logger = logging.getLogger(__name__)


def quiet_replicas(args: Any) -> None:
    """Let one process log where transformers lets one: on others lowpeak says errors alone, or what `log_level_replica` sets."""
    if args.should_log:
        return
    asked = args.log_level_replica not in ("warning", "passive")  # warning is transformers' default
    logging.getLogger("lowpeak").setLevel(args.get_process_log_level() if asked else logging.ERROR)


def take_up(output_dir: Path, resume_from_checkpoint: str | bool | None) -> Path | None:
    """Clear what a killed run left half done, and return the checkpoint to go on from; one process calls it.

    After torchrun has started the ranks again (TORCHELASTIC_RESTART_COUNT), that is the last whole one, whatever the arguments
    of the first start were; as they say where there is none yet.
    """
    sweep(output_dir)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    last = last_checkpoint(output_dir)
    if restarts and last is not None:
        logger.warning("Started again (restart %d): going on from %s.", restarts, last)
        return find_resume(output_dir, True)
    return find_resume(output_dir, resume_from_checkpoint)


def put_others_aside(output_dir: Path, step: int) -> None:
    """Move checkpoints beyond `step` out of the way; one process calls it, before the journal loses the steps to them."""
    aside = set_aside(output_dir, step)
    if aside is not None:
        logger.warning("Checkpoints of another run stood in %s; they are now in %s.", output_dir, aside)

"""Progress: what a step is busy with, beside the bar that transformers draws; and where memory ran out, what to set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.trainer_callback import ProgressCallback

from lowpeak.memory.phases import Phase
from lowpeak.memory.tracker import MemoryTracker
from lowpeak.training.exhausted import explained

_SHOWN = {
    Phase.ROLLOUT: "generating",
    Phase.REWARD: "rewarding",
    Phase.SCORE: "scoring",
    Phase.TRAIN: "training",
    Phase.EVALUATE: "evaluating",
    Phase.SAVE: "saving",
}


class ProgressTracker(MemoryTracker):
    """A memory tracker that says on the trainer's progress bar which phase runs, and explains one that runs out of memory."""

    def __init__(self, device: torch.device | str, trainer: Any) -> None:
        super().__init__(device)
        self._trainer = trainer

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Measure the block, and show its name."""
        if phase in _SHOWN:
            self._show(_SHOWN[phase])
        with super().phase(phase), explained(phase, self._trainer):
            yield

    def _show(self, text: str) -> None:
        for callback in self._trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None) if isinstance(callback, ProgressCallback) else None
            if bar is not None:
                bar.set_postfix_str(text)

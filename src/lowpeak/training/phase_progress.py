"""The phase of a step beside transformers' progress bar, and what to set where memory runs out in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.trainer_callback import ProgressCallback

from lowpeak.errors import MemoryExhaustedError, first_line
from lowpeak.memory import MemoryTracker, Phase, is_exhaustion

_PASSES = "set micro_batch_tokens below {micro_batch_tokens} and logprob_chunk_size below {logprob_chunk_size}"
_SHARD = "shard over more ranks (FSDP2, ZeRO-3), or train an adapter"
_REMEDIES = {
    Phase.ROLLOUT: "set kv_cache_bytes below {kv_cache_bytes}, or max_completion_length lower",
    Phase.EVALUATE: "set kv_cache_bytes below {kv_cache_bytes}, or per_device_eval_batch_size lower",
    Phase.SCORE: _PASSES,
    Phase.TRAIN: f"{_PASSES}; where weights, gradients and optimizer states alone do not fit, {_SHARD}",
    Phase.OPTIMIZER: _SHARD,
}


@contextmanager
def explained(phase: Phase, trainer: Any) -> Iterator[None]:
    """MemoryExhaustedError, with the sizes that the trainer runs with, in the place of torch's or Python's own."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryExhaustedError) or not is_exhaustion(error):
            raise
        sizes = trainer.run.sizes.as_dict()
        remedy = _REMEDIES.get(phase, "free memory on that device for it").format(**sizes)
        words = first_line(error)
        raise MemoryExhaustedError(f"out of memory in phase {phase}: {remedy}. ({words})") from error


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
        if phase in _SHOWN:
            self._show(_SHOWN[phase])
        with super().phase(phase), explained(phase, self._trainer):
            yield

    def _show(self, text: str) -> None:
        for callback in self._trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None) if isinstance(callback, ProgressCallback) else None
            if bar is not None:
                bar.set_postfix_str(text)

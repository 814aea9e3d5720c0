"""Out of memory in a phase, said in one sentence: in which phase, and what to set. Other ranks add whose it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowpeak.errors import MemoryExhaustedError, first_line
from lowpeak.memory.exhaustion import is_exhaustion
from lowpeak.memory.phases import Phase

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

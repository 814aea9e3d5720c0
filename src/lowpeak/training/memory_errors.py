"""Errors of phases that ran out of memory, with the run's sizes and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lowpeak.errors import MemoryExhaustedError, first_line
from lowpeak.memory import Phase, is_out_of_memory
from lowpeak.training.run import RunContext

_SMALLER_PASSES = "set micro_batch_tokens below {micro_batch_tokens} and logprob_chunk_size below {logprob_chunk_size}"
_SHARD = "shard over more ranks (FSDP2, ZeRO-3), or train an adapter"
_REMEDIES = {
    Phase.ROLLOUT: "set kv_cache_bytes below {kv_cache_bytes}, or max_completion_length lower",
    Phase.EVALUATE: "in generation, set kv_cache_bytes below {kv_cache_bytes} or per_device_eval_batch_size lower; in passes, "
    + _SMALLER_PASSES,
    Phase.SCORE: _SMALLER_PASSES,
    Phase.TRAIN: f"{_SMALLER_PASSES}; if weights, gradients and optimizer states alone do not fit, {_SHARD}",
    Phase.OPTIMIZER: _SHARD,
}


@contextmanager
def explain_out_of_memory(phase: Phase, context: RunContext) -> Iterator[None]:
    """Raise MemoryExhaustedError, with the run's sizes and a remedy, in place of torch's or Python's error."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryExhaustedError) or not is_out_of_memory(error):
            raise
        remedy = _REMEDIES.get(phase, "free memory on that device for it").format(**context.run.sizes.as_dict())
        reason = first_line(error)
        raise MemoryExhaustedError(f"out of memory in phase {phase}: {remedy}. ({reason})", reason) from error

"""What to change if vLLM does not fit its memory, in the run's words: a sentence to add to vLLM's own message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lowpeak.arguments import ColocateSettings, ServerSettings


@dataclass(frozen=True)
class Launched:
    """A server that the run's command started: the run's arguments size it."""

    tensor_parallel_size: int


Where: TypeAlias = ColocateSettings | ServerSettings | Launched


def remedy(where: ColocateSettings | Launched, batch_size: int | None = None) -> str:
    """Return what to change if memory or the context was too small: a sentence that says so, since not every failure is."""
    words = [
        f"{cache_share(where, 'change')}",
        f"lower {option(where, 'max_model_length')}",
        f"lower vllm_batch_size ({'unset' if batch_size is None else f'now {batch_size}'})",
        f"raise vllm_tensor_parallel_size (now {where.tensor_parallel_size})",
    ]
    if isinstance(where, ColocateSettings):
        words.append("set offload_during_rollout=True, so that the trainer makes room")
    return f"If memory or the context was too small: {', or '.join(words)}."


def option(where: Where, name: str) -> str:
    """Return how an option of the engine is written where the engine is configured."""
    if not isinstance(where, ServerSettings):
        return f"vllm_{name}"
    return f"`lowpeak serve --{'max_model_len' if name == 'max_model_length' else name}`"


def cache_share(where: Where, verb: str) -> str:
    """Return what sizes the KV cache: bytes if they were given, else vLLM's share of the device."""
    if isinstance(where, ServerSettings):
        return f"{verb} {option(where, 'gpu_memory_utilization')} (or its --kv_cache_memory_bytes)"
    if isinstance(where, Launched):
        return f"{verb} vllm_gpu_memory_utilization (or kv_cache_bytes)"
    if where.kv_cache_bytes is not None:
        return f"{verb} kv_cache_bytes (now {where.kv_cache_bytes})"
    return f"{verb} vllm_gpu_memory_utilization (now {where.gpu_memory_utilization}) or set kv_cache_bytes"

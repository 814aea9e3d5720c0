"""Sizes that bound memory; None is `auto`, resolved from free memory once and then checkpointed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemorySettings:
    """Bounds of a run: tokens of a micro-batch, tokens of a log-prob chunk, bytes of the engine's KV cache; and where
    activations wait."""

    micro_batch_tokens: int | None = None
    logprob_chunk_size: int | None = None
    kv_cache_bytes: int | None = None
    pad_to_multiple_of: int = 1
    activation_offloading: bool = False

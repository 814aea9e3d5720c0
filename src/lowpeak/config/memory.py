"""Sizes that bound memory, and how rows are laid out; None is `auto`, resolved once and then checkpointed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemorySettings:
    """Bounds of a run: tokens of a micro-batch, tokens of a log-prob chunk, bytes of the engine's KV cache; and where
    activations wait.

    `gather_budget` is how many bytes of a sharded model stay gathered while it generates. `frozen_on_host` keeps frozen
    models in host memory; `idle_on_host` sends what generating does not need there while a rollout is made. `padding_free`
    False pads rows side by side, and `packing` asks for rows without padding, as True does; `share_prompt` True forwards a
    prompt once wherever rows have the same.
    """

    micro_batch_tokens: int | None = None
    logprob_chunk_size: int | None = None
    kv_cache_bytes: int | None = None
    pad_to_multiple_of: int = 1
    padding_free: bool | None = None
    packing: bool = False
    share_prompt: bool | None = None
    activation_offloading: bool = False
    gather_budget: int | None = None
    frozen_on_host: bool = False
    idle_on_host: bool = False

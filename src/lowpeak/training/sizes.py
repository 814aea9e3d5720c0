"""The sizes that bound memory, with `auto` resolved; checkpointed, so that a resumed run does the same sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from lowpeak.config.memory import MemorySettings
from lowpeak.memory.fit import Shape, fit_chunk, fit_kv_cache, fit_micro_batch
from lowpeak.memory.tracker import free_bytes


def training_bytes(model: nn.Module) -> int:
    """Bytes that training will add to the weights: a gradient and AdamW's two states for each trainable parameter."""
    return sum(3 * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


@dataclass(frozen=True)
class Sizes:
    """Tokens of a micro-batch, tokens of a log-prob chunk, bytes of the engine's KV cache."""

    micro_batch_tokens: int
    logprob_chunk_size: int
    kv_cache_bytes: int

    @classmethod
    def of(cls, memory: MemorySettings, policy: Any, device: torch.device, *, bf16: bool, checkpointing: bool) -> Sizes:
        """What was asked for, and for `auto` what fits into the memory that training the policy leaves of the free."""
        shape, free = Shape.of(policy.config, 2 if bf16 else 4), max(0, free_bytes(device) - training_bytes(policy))
        return cls(
            memory.micro_batch_tokens or fit_micro_batch(shape, free, checkpointing),
            memory.logprob_chunk_size or fit_chunk(shape, free),
            memory.kv_cache_bytes or fit_kv_cache(free),
        )

    def as_dict(self) -> dict[str, int]:
        """As plain numbers, for the checkpoint."""
        return asdict(self)

    def resumed(self, saved: Mapping[str, Any], memory: MemorySettings) -> Sizes:
        """These sizes with `auto` ones as they were when the run was saved; explicit ones stay."""
        return replace(self, **{n: int(v) for n, v in saved.items() if getattr(memory, n, 0) is None})

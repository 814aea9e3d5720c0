"""The sizes that bound memory and the rows' layout, with `auto` resolved; checkpointed: a resumed run does the same sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowpeak.arguments import MemorySettings
from lowpeak.batching import Budget, Costs
from lowpeak.memory import Shape, fit_chunk, fit_kv_cache, fit_micro_batch, free_bytes
from lowpeak.parallel import Shares
from lowpeak.ranks import Ranks
from lowpeak.training.layouts import LayoutChoice


def training_bytes(model: nn.Module, device: torch.device, shares: Shares) -> int:
    """Bytes of the device that training will take beyond what it takes now, by what it will hold of each parameter.

    A gradient and AdamW's two states of those that are trained, and all weights that are elsewhere yet (FSDP2 and DeepSpeed move
    them when the model is prepared).
    """
    total = 0.0
    for parameter in model.parameters():
        own, size = _own(parameter, shares)
        if parameter.device.type != device.type:
            total += own.weights * size
        if parameter.requires_grad:
            total += (own.gradients + 2 * own.states) * size
    return int(total)


def _own(parameter: nn.Parameter, shares: Shares) -> tuple[Shares, int]:
    """How much of how many bytes; one that was cut where it was loaded keeps all of what is here."""
    local = getattr(parameter, "_local_tensor", None)
    if local is not None:
        return Shares(), local.numel() * local.element_size()
    return shares, getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()


_NUMBERS = ("micro_batch_tokens", "logprob_chunk_size", "kv_cache_bytes")


@dataclass(frozen=True)
class Sizes:
    """Tokens of a micro-batch, tokens of a log-prob chunk, bytes of the engine's KV cache, how rows are laid out."""

    micro_batch_tokens: int
    logprob_chunk_size: int
    kv_cache_bytes: int
    choice: LayoutChoice

    @classmethod
    def of(
        cls,
        memory: MemorySettings,
        policy: Any,
        device: torch.device,
        choice: LayoutChoice,
        ranks: Ranks,
        *,
        bf16: bool,
        checkpointing: bool,
        shares: Shares,
    ) -> Sizes:
        """What was asked for, and for `auto` what fits into the memory that training the policy leaves of the free.

        Of the rank that has least: all ranks run with the same sizes. `shares` is how the policy will be cut.
        """
        itemsize = 2 if bf16 else 4
        shape = Shape.of(policy.config, itemsize, max(itemsize, policy.get_input_embeddings().weight.element_size()))
        free = int(ranks.min([max(0, free_bytes(device) - training_bytes(policy, device, shares))])[0])
        return cls(
            memory.micro_batch_tokens or fit_micro_batch(shape, free, checkpointing),
            memory.logprob_chunk_size or fit_chunk(shape, free),
            memory.kv_cache_bytes or fit_kv_cache(free),
            choice,
        )

    def as_dict(self) -> dict[str, int | str]:
        return {**{name: getattr(self, name) for name in _NUMBERS}, "layout": self.choice.layout}

    def resumed(self, saved: Mapping[str, Any], memory: MemorySettings) -> Sizes:
        """These sizes with `auto` ones as they were when the run was saved; explicit ones stay.

        A checkpoint that says no layout is of a version that padded.
        """
        numbers = {name: int(saved[name]) for name in _NUMBERS if name in saved and getattr(memory, name) is None}
        return replace(self, **numbers, choice=self.choice.resumed(saved.get("layout", "padded")))

    def budget(self, memory: MemorySettings, pad_id: int, config: Any) -> Budget:
        shape = Shape.of(config, 4)
        costs = None if memory.share_prompt else Costs.of(shape.hidden, shape.intermediate)
        return Budget(self.micro_batch_tokens, memory.pad_to_multiple_of, pad_id, self.choice.layout, costs)

    def within(self, budget: Budget) -> Budget:
        return replace(budget, max_tokens=self.micro_batch_tokens, layout=self.choice.layout)

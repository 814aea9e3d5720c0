"""Models that are never trained (reference, reward, later a value's first copy): sharded like the policy, whole nowhere.

Each is cut by the engine that cuts the policy, layer by layer, so that an average of the two needs no exchange. It runs through
`gathered`: a layer at a time, in step on all ranks. An engine of its own (DeepSpeed's) or one unit around the whole model
would gather all of it in each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.strategies.flat import FlatShard, Sharded, whole
from lowpeak.strategies.gathered import layers_of


@dataclass(frozen=True)
class Frozen:
    """A frozen model; `ready()` is a context, entered by every rank together, in which it may be called."""

    model: nn.Module
    ready: Callable[[], AbstractContextManager[Any]]


def freeze(model: nn.Module) -> nn.Module:
    """The model in eval mode, without gradients."""
    return model.requires_grad_(False).eval()


def shard_rows(model: nn.Module, mesh: Any, on_host: bool) -> nn.Module:
    """`fully_shard` on each layer and on the rest; `on_host` keeps shards in (pinned) host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy() if on_host else OffloadPolicy()}
    for layer in layers_of(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def frozen_bytes(model: nn.Module) -> int:
    """Bytes of the model's parameters, each once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def shards_of(model: nn.Module, sharded: Sharded) -> dict[str, FlatShard]:
    """Every parameter's range on this rank, by name; whole ones as one range."""
    return {name: sharded(p) or whole(p.detach()) for name, p in model.named_parameters()}


def average(reference: Mapping[str, FlatShard], policy: Mapping[str, FlatShard], share: float) -> None:
    """reference = share * policy + (1 - share) * reference in place, on this rank's ranges alone.

    The policy's range of a parameter is the reference's, or all of it.
    """
    with torch.no_grad():
        for name, target in reference.items():
            source = policy[name]
            values: Tensor = source.local
            if source.chunk != target.chunk:
                start = target.rank * target.chunk
                values = values[start : start + target.local.numel()]
            target.local.lerp_(values.to(target.local), share)

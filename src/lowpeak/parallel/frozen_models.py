"""Models that are never trained (reference, reward, later a value's first copy): sharded like the policy, whole nowhere.

Each is cut by the engine that cuts the policy, layer by layer, so that an average of the two needs no exchange. It runs through
`gathered`: a layer at a time, in step on all ranks. An engine of its own (DeepSpeed's) or one unit around the whole model
would gather all of it in each forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowpeak.models import give_room
from lowpeak.parallel.export_params import plain_name
from lowpeak.parallel.flat_shard import FlatShard, Sharded, whole
from lowpeak.parallel.partial_gather import layers_of

_PIECE_BYTES = 8 << 20


def freeze(model: nn.Module) -> nn.Module:
    """Return the model in eval mode, without gradients."""
    return model.requires_grad_(False).eval()


def shard_rows(model: nn.Module, mesh: Any, on_host: bool, from_first: torch.device | None = None) -> nn.Module:
    """`fully_shard` on each layer and on the rest; `on_host` keeps shards in (pinned) host memory.

    With `from_first`, the device that collectives need, the weights are rank 0's, which alone has read them: each layer is
    filled just before it is cut, so that no other rank ever holds them all.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy() if on_host else OffloadPolicy()}
    for part in (*layers_of(model), model):
        if from_first is not None:
            _fill_from_first(part, from_first)
        fully_shard(part, **options)
    return model


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """Put rank 0's weights, which alone has read them, in the memory of each rank's device, and in no other rank's host memory."""
    give_room(model, device)
    model.to(device)
    _fill_from_first(model, device)
    return model


def _fill_from_first(module: nn.Module, device: torch.device) -> None:
    """Put rank 0's parameters and saved buffers, a few MB at a time, in place of what the others have; not those cut already."""
    give_room(module)
    for values in module.state_dict(keep_vars=True).values():
        if isinstance(values, DTensor):
            continue
        flat = values.detach().view(-1)
        for piece in flat.split(max(1, _PIECE_BYTES // flat.element_size())):
            travelling = piece.to(device)
            dist.broadcast(travelling, 0)
            if dist.get_rank() != 0:  # a page of the file's mapping that is written to would become rank 0's own
                piece.copy_(travelling)


def frozen_bytes(model: nn.Module) -> int:
    """Return the bytes of the model's parameters, each once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def shards_of(model: nn.Module, sharded: Sharded) -> dict[str, FlatShard]:
    """Return every parameter's range on this rank, by name; whole ones as one range."""
    return {plain_name(name): sharded(p) or whole(p.detach()) for name, p in model.named_parameters()}


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

"""Models that are never trained, such as reference and reward models: sharded layer by layer, or replicated.

They are sharded in the same way as the policy, so that an average of both needs no communication. They run in
`Gatherer.gathered_model`, one layer at a time and in lockstep on all ranks. A separate DeepSpeed engine, or one FSDP unit around
the whole model, would gather the whole model in each forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowpeak.models import materialize_meta_params
from lowpeak.parallel.parameters import FlatShard, ShardOf, clean_parameter_name, local_shard
from lowpeak.parallel.partial_gather import decoder_layers

_PIECE_BYTES = 8 << 20


def freeze(model: nn.Module) -> nn.Module:
    """Return the model in eval mode, without gradients."""
    return model.requires_grad_(False).eval()


def shard_layers(model: nn.Module, mesh: Any, on_host: bool, from_rank_0: torch.device | None = None) -> nn.Module:
    """Apply `fully_shard` to each layer and to the rest; `on_host` stores the shards in (pinned) host memory.

    If rank 0 alone has read the weights, `from_rank_0` is the device for broadcasts. Each layer is broadcast just before it is
    sharded, so that no other rank ever stores all weights.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy() if on_host else OffloadPolicy()}
    for part in (*decoder_layers(model), model):
        if from_rank_0 is not None:
            _broadcast_weights(part, from_rank_0)
        fully_shard(part, **options)
    return model


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """Copy rank 0's weights to each rank's device, without using the other ranks' host memory."""
    materialize_meta_params(model, device)
    model.to(device)
    _broadcast_weights(model, device)
    return model


def _broadcast_weights(module: nn.Module, device: torch.device) -> None:
    """Broadcast rank 0's parameters and saved buffers in pieces of a few MB; parameters that are sharded already are skipped."""
    materialize_meta_params(module)
    for values in module.state_dict(keep_vars=True).values():
        if isinstance(values, DTensor):
            continue
        flat = values.detach().view(-1)
        for piece in flat.split(max(1, _PIECE_BYTES // flat.element_size())):
            buffer = piece.to(device)
            dist.broadcast(buffer, 0)
            # Rank 0's weights may be pages of a mapped file: a write would copy them into its private memory.
            if dist.get_rank() != 0:
                piece.copy_(buffer)


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of the model's parameters; a tied parameter counts once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def shards_of(model: nn.Module, shard_of: ShardOf) -> dict[str, FlatShard]:
    """Return this rank's shard of every parameter, by name; a replicated parameter is one shard."""
    return {clean_parameter_name(name): shard_of(p) or local_shard(p.detach()) for name, p in model.named_parameters()}


def average(reference: Mapping[str, FlatShard], policy: Mapping[str, FlatShard], share: float) -> None:
    """Update reference = share * policy + (1 - share) * reference in place, on this rank's shards.

    The policy's shard of a parameter must be the same range as the reference's, or the whole parameter.
    """
    with torch.no_grad():
        for name, target in reference.items():
            source = policy[name]
            values: Tensor = source.local
            if source.chunk != target.chunk:
                start = target.rank * target.chunk
                values = values[start : start + target.local.numel()]
            target.local.lerp_(values.to(target.local), share)

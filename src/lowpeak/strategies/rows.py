"""The rows of a parameter that `fully_shard` left on this rank, as a flat range."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lowpeak.strategies.flat import FlatShard


def rows_shard(parameter: nn.Parameter, dtype: torch.dtype | None, device: torch.device) -> FlatShard | None:
    """A parameter's rows on this rank, None for one that is not cut; its replicas across hosts (HSDP) are left alone.

    `dtype` is what the model computes in, None the parameter's own.
    """
    if not isinstance(parameter, DTensor):
        return None
    dims = [dim for dim, placement in enumerate(parameter.placements) if placement.is_shard(0)]
    assert len(dims) == 1, "fully_shard cuts rows, along one axis of the mesh"
    mesh, num_rows = parameter.device_mesh, parameter.shape[0]
    rows_per_rank = -(-num_rows // mesh.size(dims[0]))
    local = parameter.to_local().detach().reshape(-1)
    chunk = rows_per_rank * (parameter.numel() // num_rows)
    return FlatShard(parameter.shape, chunk, local, dtype or parameter.dtype, device, mesh.get_group(dims[0]))

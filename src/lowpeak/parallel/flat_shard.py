"""Flat shards: the one form of a sharded parameter under FSDP2, ZeRO-3 and tensor parallelism.

FSDP2 gives rank r the rows [r*c, (r+1)*c) with c = ceil(rows / ranks), ZeRO-3 the values [r*c, (r+1)*c) with c = ceil(values /
ranks). Both are ranges of the flattened parameter; the last ranges are short or padded. So gathering, exporting and looking up
rows are implemented once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowpeak.records import WeightSlice

# Renamed in torch 2.13, where the old names warn.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

LoraDelta = Callable[[int, int], Tensor]  # (first, last) -> what LoRA adds to values [first, last) of a parameter
ShardOf = Callable[[nn.Parameter], "FlatShard | None"]  # None for a replicated parameter

_REPLICATED = object()  # the group of a replicated parameter, which needs no communication


@dataclass(frozen=True)
class FlatShard:
    """A sharded parameter of `shape`: rank r of the group stores the flat range [r * chunk, (r + 1) * chunk).

    `local` is a view of this rank's values, at most `chunk`; `dtype` is the dtype that the model computes in. `to_param`
    converts the gathered values to what the model expects: a DTensor under tensor parallelism.
    """

    shape: torch.Size
    chunk: int
    local: Tensor
    dtype: torch.dtype
    device: torch.device
    group: Any = None
    to_param: Callable[[Tensor], Tensor] | None = None

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the gathered parameter in the dtype of computation."""
        return self.numel * self.dtype.itemsize

    @property
    def padded_numel(self) -> int:
        """Return the number of values that a gather writes: `chunk` for each rank."""
        return self.chunk * dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def padded_local(self) -> Tensor:
        """Return this rank's `chunk` values in `dtype` on `device`, with zeros beyond the parameter's end."""
        local = self.local.to(self.device, self.dtype, non_blocking=True)
        if local.numel() == self.chunk:
            return local
        padded = local.new_zeros(self.chunk)
        padded[: local.numel()] = local
        return padded

    def start_gather(self, into: Tensor) -> Any:
        """Start to gather the parameter into the first `padded_numel` values of a flat buffer; return a handle with `wait()`."""
        return all_gather(into[: self.padded_numel], self.padded_local(), group=self.group, async_op=True)

    def broadcast(self, first: int, last: int, into: Tensor, delta: LoraDelta | None = None) -> Tensor:
        """Broadcast values [first, last) from the rank that stores them; that rank adds `delta` first.

        Returns a view of the flat buffer `into`, in its dtype; the sender returns its own storage if dtype and device match.
        """
        owner, values = first // self.chunk, into[: last - first]
        if self.group is _REPLICATED or self.rank == owner:
            local = self.local[first - owner * self.chunk : last - owner * self.chunk]
            if delta is not None:
                local = (local.to(self.device) + delta(first, last)).to(local.dtype)
            matches = local.dtype == into.dtype and local.device == into.device
            values = local if matches else values.copy_(local)
        if self.group is not _REPLICATED:
            dist.broadcast(
                values, dist.get_process_group_ranks(self.group or dist.group.WORLD)[owner], group=self.group
            )
        return values

    def view(self, gathered: Tensor) -> Tensor:
        """Return the parameter as a view of a gathered buffer."""
        values = gathered[: self.numel].view(self.shape)
        return values if self.to_param is None else self.to_param(values)

    def full_tensor(self) -> Tensor:
        """Gather and return the whole parameter in its storage dtype, on every rank."""
        if self.group is _REPLICATED:
            return self.local.view(self.shape)
        stored = replace(self, dtype=self.local.dtype)
        buffer = torch.empty(self.padded_numel, dtype=stored.dtype, device=self.device)
        stored.start_gather(buffer).wait()
        return self.view(buffer)


def local_shard(values: Tensor) -> FlatShard:
    """Return all local values as one shard: of a replicated parameter, or of this process's part under tensor parallelism."""
    values = values.to_local() if isinstance(values, DTensor) else values
    return FlatShard(values.shape, values.numel(), values.reshape(-1), values.dtype, values.device, _REPLICATED)


def fsdp_shard(parameter: nn.Parameter, dtype: torch.dtype | None, device: torch.device) -> FlatShard | None:
    """Return the rows of a parameter that `fully_shard` gave this rank; None if the parameter is not sharded.

    `dtype` is the dtype that the model computes in (None: the parameter's). Under HSDP the shard is of this rank's replica.
    """
    if not isinstance(parameter, DTensor):
        return None
    dims = [dim for dim, placement in enumerate(parameter.placements) if placement.is_shard(0)]
    assert len(dims) == 1, "fully_shard shards rows, along one axis of the mesh"
    mesh, num_rows = parameter.device_mesh, parameter.shape[0]
    rows_per_rank = -(-num_rows // mesh.size(dims[0]))
    local = parameter.to_local().detach().reshape(-1)
    chunk = rows_per_rank * (parameter.numel() // num_rows)
    return FlatShard(parameter.shape, chunk, local, dtype or parameter.dtype, device, mesh.get_group(dims[0]))


@dataclass(frozen=True)
class ExportParam:
    """A parameter to export: its name for the receiver, its shard, and the LoRA delta to add.

    `make_delta` is called on every rank just before the parameter is exported, and may gather LoRA's factors.
    """

    name: str
    shard: FlatShard
    make_delta: Callable[[], LoraDelta | None] = lambda: None


def broadcast_slices(params: Iterable[ExportParam], max_bytes: int, dtype: torch.dtype | None) -> Iterator[WeightSlice]:
    """Yield every parameter in flat slices of at most `max_bytes`, in order; each slice's owner broadcasts it to its group.

    A slice's values are valid until the next slice: all slices share one buffer.
    """
    buffer = torch.empty(0, dtype=torch.uint8)
    for param in params:
        shard, target, delta = param.shard, dtype or param.shard.local.dtype, param.make_delta()
        count = max(1, max_bytes // target.itemsize)
        longest = min(count, shard.chunk, shard.numel) * target.itemsize
        if buffer.numel() < longest or buffer.device != shard.device:
            buffer = torch.empty(longest, dtype=torch.uint8, device=shard.device)
        into = buffer[: buffer.numel() // target.itemsize * target.itemsize].view(target)
        for start in range(0, shard.numel, max(1, shard.chunk)):
            stop = min(start + shard.chunk, shard.numel)
            for first in range(start, stop, count):
                values = shard.broadcast(first, min(first + count, stop), into, delta)
                yield WeightSlice(param.name, tuple(shard.shape), target, first, values)

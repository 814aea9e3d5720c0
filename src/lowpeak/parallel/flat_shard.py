"""A sharded parameter as what it is under every sharding engine here: a flat range of its values on each rank.

FSDP2 gives rank r rows [r*c, (r+1)*c) with c = ceil(rows / ranks), ZeRO-3 values [r*c, (r+1)*c) with c = ceil(values /
ranks). Both are ranges of the parameter laid out flat, the last ones short or padded. So gathering, streaming and looking rows
up need one form of each, whichever engine trains.
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

Added = Callable[[int, int], Tensor]  # what is added to values [first, last) of a parameter
Sharded = Callable[[nn.Parameter], "FlatShard | None"]  # a parameter's shard; None for one that every rank has whole

_EVERYBODY = object()  # the group of a parameter that every rank has whole: nothing travels


@dataclass(frozen=True)
class FlatShard:
    """A parameter of `shape`, of which the group's rank r holds the flat range [r * chunk, (r + 1) * chunk).

    `local` are this rank's values of that range, at most `chunk`, where they live; `dtype` is what the model computes in.
    `seen` makes of the gathered values what the model expects: a DTensor where they are a part of what peers hold together.
    """

    shape: torch.Size
    chunk: int
    local: Tensor
    dtype: torch.dtype
    device: torch.device
    group: Any = None
    seen: Callable[[Tensor], Tensor] | None = None

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter as the model computes with it."""
        return self.numel * self.dtype.itemsize

    @property
    def padded(self) -> int:
        """Return the number of values that a gather writes: `chunk` of each rank."""
        return self.chunk * dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def own(self) -> Tensor:
        """This rank's `chunk` values in the dtype and on the device of computing; zeros behind the parameter's end."""
        local = self.local.to(self.device, self.dtype, non_blocking=True)
        if local.numel() == self.chunk:
            return local
        whole = local.new_zeros(self.chunk)
        whole[: local.numel()] = local
        return whole

    def gather(self, into: Tensor) -> Any:
        """Begin to gather the parameter into the first `padded` values of a flat buffer; `wait()` of the answer ends it."""
        return all_gather(into[: self.padded], self.own(), group=self.group, async_op=True)

    def broadcast(self, first: int, last: int, into: Tensor, added: Added | None = None) -> Tensor:
        """Values [first, last) of one rank's range, from that rank to all of its group; with what is `added` to them.

        In the dtype of the flat buffer `into`, and in it, but where they are the owner's own values as they lie.
        """
        owner, values = first // self.chunk, into[: last - first]
        if self.group is _EVERYBODY or self.rank == owner:
            local = self.local[first - owner * self.chunk : last - owner * self.chunk]
            if added is not None:
                local = (local.to(self.device) + added(first, last)).to(local.dtype)
            here = local.dtype == into.dtype and local.device == into.device
            values = local if here else values.copy_(local)
        if self.group is not _EVERYBODY:
            dist.broadcast(
                values, dist.get_process_group_ranks(self.group or dist.group.WORLD)[owner], group=self.group
            )
        return values

    def view(self, gathered: Tensor) -> Tensor:
        values = gathered[: self.numel].view(self.shape)
        return values if self.seen is None else self.seen(values)

    def gathered(self) -> Tensor:
        """The whole parameter in its own dtype, on every rank."""
        if self.group is _EVERYBODY:
            return self.local.view(self.shape)
        own = replace(self, dtype=self.local.dtype)
        buffer = torch.empty(self.padded, dtype=own.dtype, device=self.device)
        own.gather(buffer).wait()
        return self.view(buffer)


def whole(values: Tensor) -> FlatShard:
    """A parameter that every rank has whole; or of which it has all that is not its peers'."""
    values = values.to_local() if isinstance(values, DTensor) else values
    return FlatShard(values.shape, values.numel(), values.reshape(-1), values.dtype, values.device, _EVERYBODY)


def rows_shard(parameter: nn.Parameter, dtype: torch.dtype | None, device: torch.device) -> FlatShard | None:
    """Return a parameter's rows on this rank, None for one that is not cut; its replicas across hosts (HSDP) are left alone.

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


@dataclass(frozen=True)
class Outgoing:
    """A parameter that leaves: its name for those who take it, its shard, and what makes the values added on its way.

    `adding` is called on every rank just before the parameter leaves: it may gather what it needs.
    """

    name: str
    shard: FlatShard
    adding: Callable[[], Added | None] = lambda: None


def ranges(outgoing: Iterable[Outgoing], max_bytes: int, dtype: torch.dtype | None) -> Iterator[WeightSlice]:
    """Every parameter in flat ranges of at most `max_bytes`, in order: the owner of a range broadcasts it to its group.

    A slice's values are good until the next one is asked for: all come through one buffer.
    """
    buffer = torch.empty(0, dtype=torch.uint8)
    for one in outgoing:
        shard, target, added = one.shard, dtype or one.shard.local.dtype, one.adding()
        count = max(1, max_bytes // target.itemsize)
        longest = min(count, shard.chunk, shard.numel) * target.itemsize
        if buffer.numel() < longest or buffer.device != shard.device:
            buffer = torch.empty(longest, dtype=torch.uint8, device=shard.device)
        into = buffer[: buffer.numel() // target.itemsize * target.itemsize].view(target)
        for start in range(0, shard.numel, max(1, shard.chunk)):
            stop = min(start + shard.chunk, shard.numel)
            for first in range(start, stop, count):
                values = shard.broadcast(first, min(first + count, stop), into, added)
                yield WeightSlice(one.name, tuple(shard.shape), target, first, values)

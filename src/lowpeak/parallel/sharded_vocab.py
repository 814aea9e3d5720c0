"""Embedding and head that stay sharded: rows are looked up and multiplied where they live.

They are the largest tensors of a model, so gathering them would decide what generation takes. Here ids and hidden states
travel in their place. Shapes: W ranks, N tokens of this rank, M the most of any rank (in a round), v rows a rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lowpeak.parallel.flat_shard import FlatShard, all_gather

_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_MAX_BYTES = 1 << 25  # of what travels at a time


class ShardedRows:
    """A [V, D] parameter cut between rows, whose whole no rank ever has."""

    def __init__(self, shard: FlatShard, in_fp32: bool = False) -> None:
        assert is_row_aligned(shard), "rows are cut"
        self._group = shard.group
        self._num_rows, self._width = shard.shape
        self._per_rank = shard.chunk // self._width
        self._first = shard.rank * self._per_rank
        self._world = dist.get_world_size(shard.group)
        local = shard.local.to(shard.device, torch.float32 if in_fp32 else shard.dtype)
        held = max(0, min(self._per_rank, self._num_rows - self._first))
        self._rows_vD = local[: held * self._width].view(held, self._width)

    def look_up(self, ids: Tensor) -> Tensor:
        """Return `embedding(ids)`, [..., D]."""
        ids_N = ids.reshape(-1)
        out_ND = self._rows_vD.new_empty(len(ids_N), self._width)
        for start, size in self._rounds(len(ids_N), self._width, ids.device):
            part_N = ids_N[start : start + size]
            all_WM = self._gathered(_extended(part_N, size))
            own_MD = self._rows_vD.new_empty(size, self._width)
            _reduce_scatter(own_MD, self._found(all_WM - self._first), group=self._group)
            out_ND[start : start + size] = own_MD[: len(part_N)]
        return out_ND.view(*ids.shape, self._width)

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Return `hidden @ weight.T + bias`, [..., V]: hidden states of all ranks meet each rank's rows, and products go home."""
        hidden_ND = hidden.reshape(-1, self._width).to(self._rows_vD.dtype)
        out_NV = self._rows_vD.new_empty(len(hidden_ND), self._num_rows)
        for start, size in self._rounds(len(hidden_ND), self._per_rank, hidden.device):
            part_ND = hidden_ND[start : start + size]
            all_WMD = self._gathered(_extended(part_ND, size))
            products = self._rows_vD.new_zeros(len(all_WMD), self._per_rank)
            products[:, : len(self._rows_vD)] = functional.linear(all_WMD, self._rows_vD)
            mine = torch.empty_like(products)
            dist.all_to_all_single(mine, products, group=self._group)
            block_MV = mine.view(self._world, size, -1).transpose(0, 1).reshape(size, -1)
            out_NV[start : start + size] = block_MV[: len(part_ND), : self._num_rows]
        if bias is not None:
            out_NV += bias.to(out_NV.dtype)
        return out_NV.view(*hidden.shape[:-1], -1)

    # What a rank without a forward of its own does: it takes part in the others'.

    def idle_look_up(self) -> None:
        self.look_up(torch.zeros(1, dtype=torch.int64, device=self._rows_vD.device))

    def idle_multiply(self) -> None:
        self.multiply(self._rows_vD.new_zeros(1, self._width), None)

    def _rounds(self, number: int, values_per_token: int, device: torch.device) -> list[tuple[int, int]]:
        """Start and size of each round: equally many on every rank, each of at most `_MAX_BYTES` in all."""
        most = int(self._gathered(torch.tensor([number], device=device)).max())
        size = max(1, _MAX_BYTES // (self._world * values_per_token * self._rows_vD.element_size()))
        return [(start, min(size, most - start)) for start in range(0, most, size)]

    def _gathered(self, own: Tensor) -> Tensor:
        everybodys = own.new_empty(self._world * len(own), *own.shape[1:])
        all_gather(everybodys, own, group=self._group)
        return everybodys

    def _found(self, places: Tensor) -> Tensor:
        """The rows at these places of this rank's; zeros for places that are others'."""
        here = (places >= 0) & (places < len(self._rows_vD))
        if not len(self._rows_vD):
            return self._rows_vD.new_zeros(len(places), self._width)
        return self._rows_vD[places.clamp(0, len(self._rows_vD) - 1)] * here[:, None]


def is_row_aligned(shard: FlatShard) -> bool:
    """Whether a parameter is a matrix that is cut between rows: FSDP2 always does, ZeRO where rows divide by ranks."""
    return len(shard.shape) == 2 and shard.chunk % shard.shape[1] == 0


def _extended(part: Tensor, size: int) -> Tensor:
    whole = part.new_zeros(size, *part.shape[1:])
    whole[: len(part)] = part
    return whole

"""Embedding and head that stay sharded: each rank looks up and multiplies its rows.

They are a model's largest tensors, so gathering them would set the memory peak of generation. Ranks exchange ids and hidden
states instead. Shapes: W ranks, N tokens of this rank, M the maximum over ranks (per round), P = W * M, v rows per rank, D
hidden, V all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowpeak.logprobs import no_autocast, wide_dtype, wide_linear
from lowpeak.parallel.parameters import FlatShard, all_gather, gather_numbers

_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_MAX_BYTES = 1 << 25  # of one round's exchange


class ShardedRows:
    """A [V, D] parameter sharded by rows, which is never gathered."""

    def __init__(self, shard: FlatShard, in_fp32: bool = False) -> None:
        assert is_row_aligned(shard), "shards are whole rows"
        self._group = shard.group
        self._num_rows, self._width = shard.shape
        self._per_rank = shard.chunk // self._width
        self._first = shard.rank * self._per_rank
        self._in_fp32 = in_fp32
        self._world = dist.get_world_size(shard.group)
        local = shard.local.to(shard.device, torch.float32 if in_fp32 else shard.dtype)
        num_local = max(0, min(self._per_rank, self._num_rows - self._first))
        self._rows_vD = local[: num_local * self._width].view(num_local, self._width)

    def look_up(self, ids: Tensor) -> Tensor:
        """Return `embedding(ids)`, [..., D]."""
        ids_N = ids.reshape(-1)
        out_ND = self._rows_vD.new_empty(len(ids_N), self._width)
        for start, size in self._rounds(len(ids_N), self._width * self._rows_vD.itemsize, ids.device):
            part_N = ids_N[start : start + size]
            all_P = self._all_gather(_zero_padded(part_N, size))
            found_MD = self._rows_vD.new_empty(size, self._width)
            _reduce_scatter(found_MD, self._local_rows(all_P - self._first), group=self._group)
            out_ND[start : start + size] = found_MD[: len(part_N)]
        return out_ND.view(*ids.shape, self._width)

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Return `wide_linear(hidden, weight, bias)`, [..., V]: each rank multiplies all ranks' hidden states by its rows."""
        hidden_ND = hidden.reshape(-1, self._width).to(self._rows_vD.dtype)
        wide = wide_dtype(self._rows_vD.dtype)
        out_NV = self._rows_vD.new_empty(len(hidden_ND), self._num_rows, dtype=wide)
        most_bytes = max(self._per_rank * wide.itemsize, self._width * self._rows_vD.itemsize)
        for start, size in self._rounds(len(hidden_ND), most_bytes, hidden.device):
            part_ND = hidden_ND[start : start + size]
            all_PD = self._all_gather(_zero_padded(part_ND, size))
            products_Pv = self._rows_vD.new_zeros(len(all_PD), self._per_rank, dtype=wide)
            with no_autocast(hidden.device) if self._in_fp32 else nullcontext():
                products_Pv[:, : len(self._rows_vD)] = wide_linear(all_PD, self._rows_vD, None)
            received_Pv = torch.empty_like(products_Pv)
            dist.all_to_all_single(received_Pv, products_Pv, group=self._group)
            del all_PD, products_Pv
            for rank, columns in enumerate(out_NV[start : start + len(part_ND)].split(self._per_rank, dim=1)):
                columns.copy_(received_Pv.view(self._world, size, -1)[rank, : len(part_ND), : columns.shape[1]])
        if bias is not None:
            out_NV += bias.to(out_NV.dtype)
        return out_NV.view(*hidden.shape[:-1], -1)

    # A rank that has no forward left calls these, to take part in the other ranks' collectives.

    def dummy_look_up(self) -> None:
        self.look_up(torch.zeros(1, dtype=torch.int64, device=self._rows_vD.device))

    def dummy_multiply(self) -> None:
        self.multiply(self._rows_vD.new_zeros(1, self._width), None)

    def _rounds(self, number: int, bytes_per_token: int, device: torch.device) -> list[tuple[int, int]]:
        """Return start and size of each round: the same number on every rank, each of at most `_MAX_BYTES` over all ranks."""
        most = max(gather_numbers(number, device, self._group))
        size = max(1, _MAX_BYTES // (self._world * bytes_per_token))
        return [(start, min(size, most - start)) for start in range(0, most, size)]

    def _all_gather(self, local: Tensor) -> Tensor:
        result = local.new_empty(self._world * len(local), *local.shape[1:])
        all_gather(result, local, group=self._group)
        return result

    def _local_rows(self, indices: Tensor) -> Tensor:
        """Return this rank's rows at `indices`, and zeros for indices of other ranks' rows."""
        is_local = (indices >= 0) & (indices < len(self._rows_vD))
        if not len(self._rows_vD):
            return self._rows_vD.new_zeros(len(indices), self._width)
        return self._rows_vD[indices.clamp(0, len(self._rows_vD) - 1)] * is_local[:, None]


def is_row_aligned(shard: FlatShard) -> bool:
    """Return whether the shards of a matrix are whole rows: always under FSDP2, under ZeRO if ranks divide the rows."""
    return len(shard.shape) == 2 and shard.chunk % shard.shape[1] == 0


def _zero_padded(part: Tensor, size: int) -> Tensor:
    padded = part.new_zeros(size, *part.shape[1:])
    padded[: len(part)] = part
    return padded

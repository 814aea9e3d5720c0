"""Ranks: all that a step asks of other processes. One process is the degenerate case of the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """The processes of a run: `rank` of `world_size`, and the few collectives that the step needs.

    Sums and maxima are of short lists of Python numbers; they travel in float64. With one process each call is the
    identity. Collectives run on the default process group.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        live = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if live else 0
        self.world_size = dist.get_world_size() if live else 1
        self._device = device if device is not None else torch.device("cpu")

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Elementwise sum over ranks."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def max(self, numbers: Sequence[float]) -> list[float]:
        """Elementwise maximum over ranks."""
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, in rank order, on every rank."""
        if self.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item)
        return items

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.world_size > 1:
            dist.barrier()

    def _reduce(self, numbers: Sequence[float], op: Any) -> list[float]:
        if self.world_size == 1:
            return [float(x) for x in numbers]
        values = torch.tensor(list(numbers), dtype=torch.float64, device=self._device)
        dist.all_reduce(values, op=op)
        return values.tolist()

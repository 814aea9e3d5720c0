"""Frozen models beside a policy that every rank has whole (DDP, ZeRO-1 and 2): replicas too, while there is room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator, cpu_offload
from torch import nn

from lowpeak.ranks import Ranks
from lowpeak.strategies.flat import FlatShard
from lowpeak.strategies.frozen import Frozen, average, freeze, frozen_bytes, shard_rows, shards_of
from lowpeak.strategies.gathered import gathered
from lowpeak.strategies.rows import rows_shard


class Replicas:
    """How frozen models lie where parameters of the policy are not cut."""

    def __init__(self, accelerator: Accelerator, ranks: Ranks) -> None:
        self._accelerator = accelerator
        self._ranks = ranks

    def prepare_frozen(self, model: nn.Module, room: int, on_host: bool) -> Frozen:
        """A replica on the device; among several ranks it is cut between rows where one of them has no `room` for it.

        A quantised model stays where it was put.
        """
        model = freeze(model)
        if getattr(model, "is_quantized", False):
            return Frozen(model, lambda: self._ready(model))
        lacking = self._ranks.max([float(frozen_bytes(model) > room)])[0]
        if self._ranks.world_size > 1 and (on_host or lacking):
            shard_rows(model, None, on_host)
            return Frozen(model, lambda: self._ready_sharded(model))
        if on_host:
            cpu_offload(model, self._accelerator.device)
        else:
            model.to(self._accelerator.device)
        return Frozen(model, lambda: self._ready(model))

    def average(self, reference: nn.Module, policy: nn.Module, share: float) -> None:
        """See `frozen.average`."""
        average(shards_of(reference, self._shard), shards_of(policy, self._shard), share)

    @contextmanager
    def _ready(self, model: nn.Module) -> Iterator[nn.Module]:
        with self._accelerator.autocast():
            yield model

    @contextmanager
    def _ready_sharded(self, model: nn.Module) -> Iterator[nn.Module]:
        device = self._accelerator.device
        with self._accelerator.autocast(), gathered(model, self._shard, 0, self._ranks, device, whole_head=True):
            yield model

    def _shard(self, parameter: nn.Parameter) -> FlatShard | None:
        return rows_shard(parameter, None, self._accelerator.device)

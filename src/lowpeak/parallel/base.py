"""What all strategies have in common: a parameter is whole on this rank, or a flat range of it is (`_shard` says which)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, cpu_offload
from accelerate.utils import DistributedType
from torch import Tensor, nn

from lowpeak.parallel.checkpoint_shards import load_torch_state
from lowpeak.parallel.checkpoint_state import torch_idle
from lowpeak.parallel.export_params import layout, outgoing
from lowpeak.parallel.flat_shard import FlatShard, ranges, rows_shard
from lowpeak.parallel.frozen_models import average, freeze, frozen_bytes, replicate, shard_rows, shards_of
from lowpeak.parallel.partial_gather import Gatherer
from lowpeak.parallel.strategy import Frozen, Strategy
from lowpeak.ranks import Ranks
from lowpeak.records import Layout, Weights, WeightSlice


def num_peers(accelerator: Accelerator) -> int:
    """Return how many processes hold parts of one model's tensors and are one rank, by accelerate's parallelism config."""
    return int(getattr(accelerator.parallelism_config, "tp_size", None) or 1)


def fsdp_mesh(accelerator: Any) -> Any:
    """Return the mesh that accelerate cuts with FSDP2 on; None is all ranks."""
    mesh = getattr(accelerator, "torch_device_mesh", None)
    return None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]


class Accelerated(Strategy):
    """A strategy over what accelerate prepared. Strategies say how gradients meet, and how parameters are cut."""

    cuts_parameters = False
    cuts_states = False

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        # The one CPU has several names, and a tensor that moves from "cpu" to "cpu:0" is copied.
        self._device = torch.device("cpu") if accelerator.device.type == "cpu" else accelerator.device
        self.ranks = Ranks(self._device, num_peers(accelerator))
        self._gatherer = Gatherer(self.ranks, self._device)

    def backward(self, loss: Tensor, last: bool) -> None:
        self._accelerator.backward(loss)

    @contextmanager
    def hold(self, model: nn.Module, budget: int | None, whole_head: bool = False) -> Iterator[nn.Module]:
        inner = self._unwrapped(model)
        with self._gatherer.gathered(inner, self._shard, budget, whole_head):
            yield inner

    def slices(
        self, model: nn.Module, max_bytes: int, dtype: torch.dtype | None, weights: Weights = "merged"
    ) -> Iterator[WeightSlice]:
        return ranges(outgoing(self._unwrapped(model), self._leaving, weights), max_bytes, dtype)

    def layout(self, model: nn.Module, weights: Weights = "merged") -> Layout:
        return layout(self._unwrapped(model), self._leaving, weights)

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: shard.local for name, shard in self._shards(model).items()}

    def idle(self, model: nn.Module, optimizer: Any) -> list[Tensor]:
        return [] if optimizer is None else torch_idle(optimizer)

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        load_torch_state(checkpoint, self._unwrapped(model), optimizer, self.ranks.processes)

    def prepare_frozen(self, model: nn.Module, room: int, on_host: bool) -> Frozen:
        """Return a replica, or rows where one of several ranks has no `room` for it; a quantised model stays where it was put."""
        model = freeze(model)
        if not getattr(model, "is_quantized", False):
            lacking = self.ranks.max([float(frozen_bytes(model) > room)])[0]
            first_alone = self._first_alone_read(model)
            if self.ranks.world_size > 1 and (on_host or lacking):
                shard_rows(model, None, on_host, self._device if first_alone else None)
            elif on_host:
                cpu_offload(model, self._device)
            elif first_alone:
                replicate(model, self._device)
            else:
                model.to(self._device)
        return self._frozen(model)

    def average(self, reference: nn.Module, policy: nn.Module, share: float) -> None:
        average(self._shards(reference), self._shards(policy), share)

    def _unwrapped(self, model: nn.Module) -> nn.Module:
        """Return the model inside wrappers, each of its parameters as it is stored."""
        return self._accelerator.unwrap_model(model)

    def _first_alone_read(self, model: nn.Module) -> bool:
        """Return whether rank 0 has to hand a frozen model's weights out; what lacks them then has the dtypes that rank 0 found."""
        if not self.ranks.max([float(any(p.is_meta for p in model.parameters()))])[0]:
            return False
        dtypes = self.ranks.processes.first(lambda: {name: p.dtype for name, p in model.named_parameters()})
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                parameter.data = parameter.data.to(dtypes[name])
        return True

    def _frozen(self, model: nn.Module) -> Frozen:
        @contextmanager
        def ready() -> Iterator[nn.Module]:
            # It computes as the policy does, so that log-probs round alike.
            with self._accelerator.autocast(), self.hold(model, 0, whole_head=True) as inner:
                yield inner

        return Frozen(model, ready)

    def _shards(self, model: nn.Module) -> dict[str, FlatShard]:
        return shards_of(self._unwrapped(model), self._shard)

    def _shard(self, parameter: nn.Parameter) -> FlatShard | None:
        """Return this rank's range of a parameter, None for a whole one: here of frozen models that `fully_shard` cut."""
        return rows_shard(parameter, None, self._device)

    def _leaving(self, parameter: nn.Parameter) -> FlatShard | None:
        """Return the shard from which `slices` sends a parameter."""
        return self._shard(parameter)


class Replicated(Accelerated):
    """The whole model on each rank, as under DDP. One device is the degenerate case."""

    @property
    def promised_scale(self) -> float | None:
        alone = self._accelerator.distributed_type == DistributedType.NO
        if not alone or self.ranks.world_size != 1 or self._accelerator.scaler is not None:
            return None
        return 1.0 / self._accelerator.gradient_accumulation_steps

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        self._accelerator.gradient_state._set_sync_gradients(last)
        return nullcontext() if last else self._accelerator.no_sync(model)

"""FSDP2: each rank holds some rows of every parameter; a layer is gathered when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lowpeak.parallel.base import Accelerated, fsdp_mesh
from lowpeak.parallel.checkpoint_shards import save_shards
from lowpeak.parallel.checkpoint_state import torch_state, trained
from lowpeak.parallel.flat_shard import FlatShard, rows_shard
from lowpeak.parallel.frozen_models import freeze, shard_rows
from lowpeak.parallel.strategy import Frozen


class Fsdp2(Accelerated):
    """torch's `fully_shard`, applied by accelerate. Gradients are reduced in each micro-batch, so none is ever whole."""

    cuts_parameters = True
    cuts_states = True

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        self._accelerator.gradient_state._set_sync_gradients(True)
        return nullcontext()

    @contextmanager
    def hold(self, model: nn.Module, budget: int | None, whole_head: bool = False) -> Iterator[nn.Module]:
        with super().hold(model, budget, whole_head) as inner, _own_generate(inner):
            yield inner

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
        save_shards(checkpoint, torch_state(trained(self._unwrapped(model)), optimizer), self.ranks.processes)

    def prepare_frozen(self, model: nn.Module, room: int, on_host: bool) -> Frozen:
        """Cut like the policy, on its mesh, whatever `room` there is; with efficient loading, from rank 0's weights."""
        first_alone = self._first_alone_read(model) or self._accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
        from_first = self._device if first_alone else None
        return self._frozen(shard_rows(freeze(model), fsdp_mesh(self._accelerator), on_host, from_first))

    def _unwrapped(self, model: nn.Module) -> nn.Module:
        """Return the model inside wrappers, with its rows alone: the root's stay gathered after a forward, until a backward."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super()._unwrapped(model)

    def _shard(self, parameter: nn.Parameter) -> FlatShard | None:
        policy = self._accelerator.state.fsdp_plugin.mixed_precision_policy
        compute = getattr(policy, "param_dtype", None) if parameter.is_floating_point() else None
        return rows_shard(parameter, compute, self._device)


@contextmanager
def _own_generate(model: nn.Module) -> Iterator[None]:
    """Put the model's own `generate` in force: transformers puts one in its place that gathers by FSDP2's hooks first."""
    gathering = model.__dict__.pop("generate", None)
    try:
        yield
    finally:
        if gathering is not None:
            model.__dict__["generate"] = gathering

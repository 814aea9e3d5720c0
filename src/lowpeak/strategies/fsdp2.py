"""FSDP2: each rank holds some rows of every parameter; a layer is gathered when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lowpeak.records import WeightSlice
from lowpeak.strategies.accelerated import Accelerated
from lowpeak.strategies.flat import FlatShard
from lowpeak.strategies.frozen import freeze, shard_rows
from lowpeak.strategies.outgoing import Weights
from lowpeak.strategies.rows import rows_shard
from lowpeak.strategies.shards import save_shards
from lowpeak.strategies.states import torch_state, trained
from lowpeak.strategies.strategy import Frozen


class Fsdp2(Accelerated):
    """torch's `fully_shard`, applied by accelerate. Gradients are reduced in each micro-batch, so none is ever whole."""

    @property
    def cuts_parameters(self) -> bool:
        """Every parameter."""
        return True

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch's forward and backward: ranks add up each one's gradients, into their own shards."""
        self._accelerator.gradient_state._set_sync_gradients(True)
        return nullcontext()

    @contextmanager
    def hold(self, model: nn.Module, budget: int | None, whole_head: bool = False) -> Iterator[nn.Module]:
        """As many whole layers gathered as `budget` bytes allow, the others one at a time; see `Gatherer`."""
        reshard(model)
        with super().hold(model, budget, whole_head) as inner, _own_generate(inner):
            yield inner

    def slices(
        self, model: nn.Module, max_bytes: int, dtype: torch.dtype | None, weights: Weights = "merged"
    ) -> Iterator[WeightSlice]:
        """As ever, of rows: a forward without a backward (an evaluation) has left some parameters whole."""
        reshard(model)
        return super().slices(model, max_bytes, dtype, weights)

    def layout(self, model: nn.Module, weights: Weights = "merged") -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """As ever, of rows."""
        reshard(model)
        return super().layout(model, weights)

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        """As ever, of rows."""
        reshard(model)
        return super().shards(model)

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        """As ever, into rows."""
        reshard(model)
        super().load_state(checkpoint, model, optimizer)

    @property
    def cuts_states(self) -> bool:
        """Yes: each rank has rows of all that is trained, and of its optimizer states."""
        return True

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
        """Each rank writes its rows of the trained weights and their optimizer states."""
        reshard(model)
        state = torch_state(trained(self._accelerator.unwrap_model(model)), optimizer)
        save_shards(checkpoint, state, self._ranks.processes)

    def prepare_frozen(self, model: nn.Module, room: int, on_host: bool) -> Frozen:
        """Cut like the policy, on its mesh, whatever `room` there is; with efficient loading, from rank 0's weights."""
        first_alone = self._first_alone_read(model) or self._accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
        from_first = self._device if first_alone else None
        model = shard_rows(freeze(model), self._mesh(), on_host, from_first)
        return Frozen(model, lambda: self._ready(model))

    def _mesh(self) -> Any:
        """The mesh that accelerate cut the policy on; None is all ranks."""
        mesh = getattr(self._accelerator, "torch_device_mesh", None)
        return None if mesh is None else mesh[tuple(self._accelerator.parallelism_config.fsdp_dim_names)]

    def _shard(self, parameter: nn.Parameter) -> FlatShard | None:
        policy = self._accelerator.state.fsdp_plugin.mixed_precision_policy
        compute = getattr(policy, "param_dtype", None) if parameter.is_floating_point() else None
        return rows_shard(parameter, compute, self._device)


def reshard(model: nn.Module) -> None:
    """Let every parameter be its rows alone: the root's stay gathered after a forward, until a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def _own_generate(model: nn.Module) -> Iterator[None]:
    """The model's own `generate`: transformers puts one in its place that gathers by FSDP2's hooks first."""
    gathering = model.__dict__.pop("generate", None)
    try:
        yield
    finally:
        if gathering is not None:
            model.__dict__["generate"] = gathering

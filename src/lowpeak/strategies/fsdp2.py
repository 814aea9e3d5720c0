"""FSDP2: each rank holds some rows of every parameter; a layer is gathered when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lowpeak.ranks import Ranks
from lowpeak.records import WeightSlice
from lowpeak.strategies.flat import FlatShard, ranges
from lowpeak.strategies.gathered import gathered
from lowpeak.strategies.outgoing import Weights, layout, outgoing
from lowpeak.strategies.shards import load_torch_state, save_shards
from lowpeak.strategies.states import torch_state, trained


class Fsdp2:
    """torch's `fully_shard`, applied by accelerate. Gradients are reduced in each micro-batch, so none is ever whole."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._ranks = Ranks(accelerator.device)

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        return self._ranks

    @property
    def promised_scale(self) -> float | None:
        """None: gradients are reduced over ranks on their way."""
        return None

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch's forward and backward: ranks add up each one's gradients, into their own shards."""
        self._accelerator.gradient_state._set_sync_gradients(True)
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the loss's gradients, averaged over ranks, to the shards'."""
        self._accelerator.backward(loss)

    def own_grad_norm(self) -> Tensor | None:
        """None: gradients are the parameters' own."""
        return None

    def own_step(self) -> None:
        """Nothing: the optimizer steps by itself."""

    @contextmanager
    def hold(self, model: nn.Module, budget: int | None) -> Iterator[nn.Module]:
        """As many whole layers gathered as `budget` bytes allow, the others one at a time; see `gathered`."""
        inner = self._accelerator.unwrap_model(model)
        for module in inner.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root's parameters stay gathered after a forward
        with gathered(inner, self._shard, budget, self._ranks, self._accelerator.device):
            yield inner

    def slices(
        self, model: nn.Module, max_bytes: int, dtype: torch.dtype | None, weights: Weights = "merged"
    ) -> Iterator[WeightSlice]:
        """The parameters in flat ranges of at most `max_bytes`; the owner of rows broadcasts them."""
        return ranges(outgoing(self._accelerator.unwrap_model(model), self._shard, weights), max_bytes, dtype)

    def layout(self, model: nn.Module, weights: Weights = "merged") -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, whole shapes and dtypes of what `slices` gives."""
        return layout(self._accelerator.unwrap_model(model), self._shard, weights)

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's rows of each parameter."""
        named = self._accelerator.unwrap_model(model).named_parameters()
        return {name: (p.to_local() if isinstance(p, DTensor) else p).detach() for name, p in named}

    @property
    def sharded(self) -> bool:
        """Yes: each rank has rows of all that is trained, and of its optimizer states."""
        return True

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
        """Each rank writes its rows of the trained weights and their optimizer states."""
        state = torch_state(trained(self._accelerator.unwrap_model(model)), optimizer)
        save_shards(checkpoint, state, self._ranks)

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        """Each rank reads its rows, whatever ranks wrote them."""
        load_torch_state(checkpoint, self._accelerator.unwrap_model(model), optimizer, self._ranks)

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        """Sharded layer by layer like the policy."""
        return model.requires_grad_(False).eval()

    def _shard(self, parameter: nn.Parameter) -> FlatShard | None:
        if not isinstance(parameter, DTensor):
            return None
        policy = self._accelerator.state.fsdp_plugin.mixed_precision_policy
        compute = getattr(policy, "param_dtype", None) if parameter.is_floating_point() else None
        return rows_shard(parameter, compute or parameter.dtype, self._accelerator.device)


def rows_shard(parameter: DTensor, dtype: torch.dtype, device: torch.device) -> FlatShard:
    """A parameter that `fully_shard` cut between rows; its replicas across hosts (HSDP) are left alone."""
    dims = [dim for dim, placement in enumerate(parameter.placements) if placement.is_shard(0)]
    assert len(dims) == 1, "fully_shard cuts rows, along one axis of the mesh"
    mesh = parameter.device_mesh
    num_rows = parameter.shape[0]
    rows_per_rank = -(-num_rows // mesh.size(dims[0]))
    local = parameter.to_local().detach().reshape(-1)
    chunk = rows_per_rank * (parameter.numel() // num_rows)
    return FlatShard(parameter.shape, chunk, local, dtype, device, mesh.get_group(dims[0]))

"""FSDP2: each rank holds some rows of every parameter; a layer is gathered when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lowpeak.ranks import Ranks
from lowpeak.records import WeightSlice
from lowpeak.strategies.flat import FlatShard, ranges
from lowpeak.strategies.frozen import Frozen, average, freeze, shard_rows, shards_of
from lowpeak.strategies.gathered import gathered
from lowpeak.strategies.rows import rows_shard


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
    def hold(self, model: nn.Module, budget: int | None, whole_head: bool = False) -> Iterator[nn.Module]:
        """As many whole layers gathered as `budget` bytes allow, the others one at a time; see `gathered`."""
        inner = self._accelerator.unwrap_model(model)
        for module in inner.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root's parameters stay gathered after a forward
        with gathered(inner, self._shard, budget, self._ranks, self._accelerator.device, whole_head):
            yield inner

    def slices(self, model: nn.Module, max_bytes: int, dtype: torch.dtype | None) -> Iterator[WeightSlice]:
        """Every parameter in flat ranges of at most `max_bytes`; the owner of rows broadcasts them."""
        inner = self._accelerator.unwrap_model(model)
        return ranges(shards_of(inner, self._shard), max_bytes, dtype)

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's rows of each parameter."""
        named = self._accelerator.unwrap_model(model).named_parameters()
        return {name: (p.to_local() if isinstance(p, DTensor) else p).detach() for name, p in named}

    def prepare_frozen(self, model: nn.Module, room: int, on_host: bool) -> Frozen:
        """Cut like the policy, on its mesh, whatever `room` there is."""
        model = shard_rows(freeze(model), self._mesh(), on_host)
        return Frozen(model, lambda: self.hold(model, 0, whole_head=True))

    def average(self, reference: nn.Module, policy: nn.Module, share: float) -> None:
        """reference = share * policy + (1 - share) * reference, on this rank's rows alone."""
        inner = self._accelerator.unwrap_model(policy)
        average(shards_of(reference, self._shard), shards_of(inner, self._shard), share)

    def _mesh(self) -> Any:
        """The mesh that accelerate cut the policy on; None is all ranks."""
        mesh = getattr(self._accelerator, "torch_device_mesh", None)
        return None if mesh is None else mesh[tuple(self._accelerator.parallelism_config.fsdp_dim_names)]

    def _shard(self, parameter: nn.Parameter) -> FlatShard | None:
        policy = self._accelerator.state.fsdp_plugin.mixed_precision_policy
        compute = getattr(policy, "param_dtype", None) if parameter.is_floating_point() else None
        return rows_shard(parameter, compute, self._accelerator.device)

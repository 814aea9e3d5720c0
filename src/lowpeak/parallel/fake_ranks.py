"""FSDP2 without other ranks: a process group that moves nothing, and accelerate's own way of cutting a model on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lowpeak.errors import ArgumentError
from lowpeak.ranks import Ranks


class Pretended:
    """What `run_step` asks of a strategy, of rank 0 of so many: gradients are reduced in each micro-batch, as FSDP2 does.

    `begin` is told when a forward and a backward begin, by these words.
    """

    def __init__(self, begin: Callable[[str], object] = lambda phase: None) -> None:
        self._begin = begin
        self.ranks = Ranks()
        self.promised_scale = 1.0 if self.ranks.world_size == 1 else None

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        self._begin("forward")
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        self._begin("backward")
        loss.backward()


@contextmanager
def pretended_ranks(world_size: int) -> Iterator[None]:
    """Rank 0 of `world_size`, whose collectives return at once; ArgumentError where real ranks are connected."""
    if dist.is_initialized():
        raise ArgumentError(
            "a process that is connected to others cannot pretend to be: rehearse in a process of its own."
        )
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # names the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def layouts_apart(apart: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """What DTensor runs on fakes of whole tensors, to learn an operation's layout, runs inside `apart()`: no rank holds it."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def within(self: Any, schema: Any) -> Any:
        with apart():
            return propagate(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = within  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]


def make_mesh() -> Any:
    """The mesh of all ranks, made before anything is fake; None for one rank."""
    return init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None


def prepare(model: nn.Module, mesh: Any, compute: torch.dtype | None) -> nn.Module:
    """The model as `accelerator.prepare` leaves it: cut on the mesh if there is one, computing in `compute` if told.

    Accelerate's function cuts it, so its units are accelerate's: each layer; embedding, last norm and head; the rest.
    """
    if mesh is not None:
        _cut(model, mesh, compute)
    if compute is not None:
        forward: Any = model.forward
        computing = convert_outputs_to_fp32(
            torch.autocast("cpu", compute, cache_enabled=False)(getattr(forward, "__func__", forward))
        )
        model.forward = MethodType(computing, model)
    return model


def _cut(model: nn.Module, mesh: Any, compute: torch.dtype | None) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=MixedPrecisionPolicy(compute, compute, compute) if compute else None,
    )
    # What the function reads of an Accelerator, which would connect to real ranks.
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={("ranks",): mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=("ranks",)),
        mixed_precision="no" if compute is None else str(compute).removeprefix("torch."),
        is_main_process=False,
    )
    fsdp2_prepare_model(accelerator, model)

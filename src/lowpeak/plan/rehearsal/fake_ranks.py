"""FSDP2 and tensor parallelism in one process: a fake process group without communication, and a model's sharding on it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lowpeak.errors import ArgumentError
from lowpeak.heads import transformers_model
from lowpeak.memory import Kind
from lowpeak.models import disable_transformers_hooks
from lowpeak.parallel import (
    FlatShard,
    Gatherer,
    TrainingStrategy,
    fsdp_shard,
    reshard,
    tensor_parallel_shard,
    unit_classes,
)
from lowpeak.plan.rehearsal.storage_meter import run_methods_inside
from lowpeak.ranks import Ranks

_ALONE = Ranks()  # made outside of fake ranks: its collectives return what this rank gives


class FakeStrategy(TrainingStrategy):
    """A training strategy for rank 0 of a fake process group; as under FSDP2, each micro-batch reduces gradients.

    `begin` is called with "forward" and "backward" when these begin. `inplace`: the head may add its gradient in place.
    """

    def __init__(self, begin: Callable[[str], object] = lambda phase: None, inplace: bool = True) -> None:
        self._begin, self._inplace = begin, inplace
        # Its collectives of numbers return this rank's: those of fake ranks could not be read.
        self.ranks = copy.copy(_ALONE)
        self.ranks.world_size = Ranks().world_size

    @property
    def inplace_grad_scale(self) -> float | None:
        return 1.0 if self._inplace else None

    def micro_batch_context(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        self._begin("forward")
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        self._begin("backward")
        loss.backward()


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Become rank 0 of `world_size` fake ranks, whose collectives return at once; ArgumentError if a process group exists."""
    if dist.is_initialized():
        raise ArgumentError(
            "fake ranks need a process without a process group, and this one has one: rehearse in a separate process."
        )
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def wrap_shape_propagation(make_context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Run DTensor's shape propagation inside `make_context()`: it works on fakes of unsharded tensors, which no rank stores."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_in_context(self: Any, schema: Any) -> Any:
        with make_context():
            return propagate(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate_in_context  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]


def make_mesh(shards: int, replicas: int = 1, parts: int = 1) -> Any:
    """Return the mesh of a sharded model, None for an unsharded model; call before fake tensor mode starts.

    Its axes are those of accelerate's FSDP2, with one of replicas if there are several, or transformers' of tensor parallelism.
    """
    if parts > 1:
        return init_device_mesh("cpu", (1, 1, shards, parts), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    if shards == 1:
        return None
    if replicas == 1:
        return init_device_mesh("cpu", (shards,), mesh_dim_names=("shards",))
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicas", "shards"))


def split_like_transformers(mesh: Any, model: Any) -> nn.Module:
    """Return the model as `load_tensor_parallel` does: tensor parallel, and sharded by FSDP2 over the data ranks."""
    from transformers.distributed import DistributedConfig  # of transformers 5.23

    head = model.get_output_embeddings()
    if head is not None:  # from_pretrained ties weights after it has split them
        head.weight = nn.Parameter(head.weight.detach())
    sizes = DistributedConfig(tp_size=mesh["tp"].size(), fsdp_size=mesh["fsdp"].size())
    model = model.maybe_distribute_model(model, sizes, SimpleNamespace(get_mesh=lambda axes: mesh[axes]))
    for parameter in model.parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        if (
            isinstance(parameter, DTensor) and local.untyped_storage().nbytes() > local.nbytes
        ):  # a view of the whole parameter
            parameter._local_tensor = local.clone()
    model.tie_weights()
    disable_transformers_hooks(model)
    return cast(nn.Module, model)


@contextmanager
def gather_on_fake_ranks(
    model: nn.Module, compute: torch.dtype | None, budget: int, gather_head: bool = False
) -> Iterator[None]:
    """Gather a sharded model for forwards without gradients, as the strategy of a run on CPUs or GPUs does."""
    device, splits = torch.device("cpu"), getattr(transformers_model(model), "_tp_size", None)

    def shard_of(parameter: nn.Parameter) -> FlatShard | None:
        if splits:
            with unset_fake_temporarily():  # DTensor computes offsets with tensors, and reads them
                return tensor_parallel_shard(parameter, device)
        return fsdp_shard(parameter, compute if parameter.is_floating_point() else None, device)

    reshard(model)
    with Gatherer(_ALONE, device).gathered_model(model, shard_of, budget, gather_head):
        yield


def initialize_shards(model: nn.Module) -> None:
    """Run FSDP2's preparation of a first forward, which forgets tensors that loading has replaced."""
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()


def tag_fsdp_memory(counting_as: Callable[[Kind], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Return a context in which FSDP2's gathers and reductions run inside `counting_as` the kind of their memory."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    kinds = {"unshard": Kind.GATHERED, "wait_for_unshard": Kind.GATHERED, "post_backward": Kind.BUCKETS}
    return run_methods_inside(FSDPParamGroup, {name: partial(counting_as, kind) for name, kind in kinds.items()})


def prepare_like_accelerate(model: nn.Module, mesh: Any, compute: torch.dtype | None) -> nn.Module:
    """Return the model as `accelerator.prepare` would: sharded if there is a mesh, under autocast if `compute` is given.

    accelerate's function shards it, so its FSDP units are accelerate's: each layer; embedding, last norm and head; the rest.
    """
    if mesh is not None:
        _shard(model, mesh, compute)
    if compute is not None:
        forward: Any = model.forward
        computing = convert_outputs_to_fp32(
            torch.autocast("cpu", compute, cache_enabled=False)(getattr(forward, "__func__", forward))
        )
        model.forward = MethodType(computing, model)
    return model


def _shard(model: nn.Module, mesh: Any, compute: torch.dtype | None) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=unit_classes(model),
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=MixedPrecisionPolicy(compute, compute, compute) if compute else None,
    )
    # The attributes that accelerate's function reads; a real Accelerator would connect to real ranks.
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={("ranks",): mesh},  # of its axes accelerate passes those that FSDP2 takes
        parallelism_config=SimpleNamespace(fsdp_dim_names=("ranks",)),
        mixed_precision="no" if compute is None else str(compute).removeprefix("torch."),
        is_main_process=False,
    )
    fsdp2_prepare_model(accelerator, model)

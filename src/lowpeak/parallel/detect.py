"""The choice of a run's strategy, and the checks that the requested parallelism is in force.

Also the fraction of a model that the strategy stores on each device, known before the model is sharded or moved.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from lowpeak.arguments import is_switched_on
from lowpeak.errors import ArgumentError
from lowpeak.memory import Kind
from lowpeak.parallel.base import Replicated, fsdp_mesh, tensor_parallel_size
from lowpeak.parallel.shardings import SHARDINGS, TRAINED_KINDS, Over, Sharding
from lowpeak.parallel.strategy import InferenceStrategy, Strategy

_REPLICATED = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU)
_UNSHARDED = (DistributedType.NO, DistributedType.MULTI_CPU)
_REQUESTED = (
    ("ACCELERATE_USE_FSDP", "FSDP", DistributedType.FSDP),
    ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed", DistributedType.DEEPSPEED),
)


def detect_strategy(accelerator: Accelerator) -> Strategy:
    """Return the strategy for an accelerator's distributed type; ArgumentError for one that lowpeak does not run.

    FSDP or DeepSpeed that was requested and is not in force is an error too: accelerate would train DDP instead, which needs
    more memory than planned.
    """
    kind = accelerator.distributed_type
    for variable, name, wanted in _REQUESTED:
        if is_switched_on(os.environ, variable) and kind != wanted:
            raise _not_in_force(name, accelerator)
    if kind == DistributedType.FSDP:
        from lowpeak.parallel.fsdp2 import Fsdp2

        return Fsdp2(accelerator)
    if kind == DistributedType.DEEPSPEED:
        from lowpeak.parallel.zero import Zero

        return Zero(accelerator)
    if tensor_parallel_size(accelerator) > 1:
        from lowpeak.parallel.tensor_parallel import TensorParallel

        return TensorParallel(accelerator)
    if kind in _REPLICATED:
        return Replicated(accelerator)
    raise ArgumentError(
        f"lowpeak does not support accelerate's distributed type {kind.value} (on {accelerator.num_processes} processes): "
        "use DDP, FSDP2 or DeepSpeed ZeRO."
    )


def is_sharded(model: nn.Module) -> bool:
    """Return whether ranks store only shards of the parameters, so that a forward needs all ranks."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in model.parameters())


def check_is_sharded(strategy: InferenceStrategy, model: nn.Module) -> None:
    """Raise ArgumentError if `train()` has not sharded the model yet: until then other ranks may lack its weights."""
    if strategy.shards_parameters and not is_sharded(model):
        raise ArgumentError(
            "evaluate() and predict() need train() before them if the model is sharded: train() shards it over the ranks and "
            "broadcasts its weights. For an evaluation before the first step set eval_on_start=True."
        )


def check_devices(fsdp: bool, tensor: bool = False) -> None:
    """Raise ArgumentError if the requested parallelism cannot run on these devices; call before loading.

    `fsdp` and `tensor` tell if FSDP and tensor parallelism are requested; the environment can request FSDP as well. Needs the
    process group that TrainingArguments creates.
    """
    state = PartialState()
    _check_device_per_process(state)
    requested = {"FSDP": fsdp or is_switched_on(os.environ, "ACCELERATE_USE_FSDP"), "tensor parallelism": tensor}
    for name in requested:
        if requested[name] and state.distributed_type in _UNSHARDED:
            raise _not_in_force(name, state)


def _check_device_per_process(state: PartialState) -> None:
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if launched > 1 and state.num_processes == 1:
        raise ArgumentError(
            f"{launched} processes were launched, but accelerate found no devices for them, so each would train separately: "
            "run on a machine with devices, or set use_cpu=True (--use_cpu)."
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    devices = local if state.device.type in ("cpu", "mps") else torch.accelerator.device_count()
    if local > devices:
        raise ArgumentError(
            f"{local} processes run on this host, which has {devices} devices: start one process per device."
        )


def _not_in_force(name: str, state: Accelerator | PartialState) -> ArgumentError:
    return ArgumentError(
        f"{name} was requested, but accelerate does not use it (distributed type {state.distributed_type.value}, "
        f"{state.num_processes} processes on {state.device.type}): {name} needs processes from a launcher, each with a separate "
        "device (docs/distributed.md)."
    )


def states_on_host(state: Any) -> bool:
    """Return whether accelerate's settings keep the optimizer states off the device all the time."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    deepspeed, fsdp = getattr(state, "deepspeed_plugin", None), getattr(state, "fsdp_plugin", None)
    if deepspeed is not None:
        return zero_offloads(deepspeed, "offload_optimizer")
    return fsdp is not None and isinstance(fsdp.cpu_offload, CPUOffloadPolicy)


def zero_offloads(plugin: Any, section: str) -> bool:
    """Return whether `offload_optimizer` or `offload_param` of ZeRO's config names the CPU or NVMe."""
    config = plugin.deepspeed_config.get("zero_optimization", {}).get(section) or {}
    return config.get("device", "none") not in ("none", None)


@dataclass(frozen=True)
class DeviceFractions:
    """The fractions, from 0 to 1, of weights, gradients and AdamW states on each rank's device."""

    weights: float = 1.0
    gradients: float = 1.0
    states: float = 1.0


def sharding_of(accelerator: Accelerator) -> Sharding:
    """Return the strategy of an accelerator, with its config's offloads to host memory."""
    kind, state = accelerator.distributed_type, accelerator.state
    if kind == DistributedType.DEEPSPEED:
        return _zero_sharding(state.deepspeed_plugin)
    if tensor_parallel_size(accelerator) > 1:
        return SHARDINGS["tp"]
    if kind == DistributedType.FSDP:
        if _num_copies(accelerator) > 1:
            return replace(SHARDINGS["hsdp"], on_host=TRAINED_KINDS if states_on_host(state) else frozenset())
        return SHARDINGS["fsdp2-offload" if states_on_host(state) else "fsdp2"]
    return SHARDINGS["ddp" if accelerator.num_processes > 1 else "single"]


def _num_copies(accelerator: Accelerator) -> int:
    """Return the copies of the model under FSDP2: each is sharded over the last axis of the mesh."""
    mesh = fsdp_mesh(accelerator)
    return 1 if mesh is None else accelerator.num_processes // int(mesh.size(mesh.ndim - 1))


def _zero_sharding(plugin: Any) -> Sharding:
    row, offloaded = SHARDINGS[f"zero{int(plugin.zero_stage)}"], set()
    if zero_offloads(plugin, "offload_optimizer"):
        offloaded.add(Kind.OPTIMIZER)
        if row.gradients is not Over.NONE:  # they are reduced on the optimizer's device
            offloaded.add(Kind.GRADIENTS)
    if row.weights is not Over.NONE and zero_offloads(plugin, "offload_param"):
        offloaded.add(Kind.WEIGHTS)
    return SHARDINGS["zero3-offload"] if offloaded == TRAINED_KINDS else replace(row, on_host=frozenset(offloaded))


def device_fractions(accelerator: Accelerator) -> DeviceFractions:
    """Return the fractions under the accelerator's strategy; state in host memory counts as 0."""
    row, ranks = sharding_of(accelerator), accelerator.num_processes // tensor_parallel_size(accelerator)
    copies = _num_copies(accelerator) if accelerator.distributed_type == DistributedType.FSDP else 1
    parts = (row.fraction(kind, ranks, copies) for kind in (Kind.WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER))
    return DeviceFractions(*parts)

"""Which strategy a run has: what the user asked of accelerate, and an error when that is not in force."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from lowpeak.config.asked import is_on
from lowpeak.errors import ArgumentError
from lowpeak.strategies.accelerated import num_peers
from lowpeak.strategies.replicated import Replicated
from lowpeak.strategies.strategy import Strategy

_REPLICATED = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU)
_UNSHARDED = (DistributedType.NO, DistributedType.MULTI_CPU)
_ASKED = (
    ("ACCELERATE_USE_FSDP", "FSDP", DistributedType.FSDP),
    ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed", DistributedType.DEEPSPEED),
)


def detect_strategy(accelerator: Accelerator) -> Strategy:
    """The strategy for an accelerator's distributed type; ArgumentError for one that lowpeak does not run.

    FSDP or DeepSpeed that was asked for and is not in force is an error too: accelerate trains DDP in its place, whose
    memory is not what was planned with.
    """
    kind = accelerator.distributed_type
    for variable, name, wanted in _ASKED:
        if is_on(os.environ, variable) and kind != wanted:
            raise _not_in_force(name, kind, accelerator.num_processes, accelerator.device)
    if kind == DistributedType.FSDP:
        from lowpeak.strategies.fsdp2 import Fsdp2

        return Fsdp2(accelerator)
    if kind == DistributedType.DEEPSPEED:
        from lowpeak.strategies.zero import Zero

        return Zero(accelerator)
    if num_peers(accelerator) > 1:
        from lowpeak.strategies.tensor import TensorParallel

        return TensorParallel(accelerator)
    if kind in _REPLICATED:
        return Replicated(accelerator)
    raise ArgumentError(
        f"accelerate was configured for {kind.value} on {accelerator.num_processes} processes, which lowpeak does not run: "
        "use DDP, FSDP2 or DeepSpeed ZeRO."
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether a rank holds parts of the model's parameters alone, so that a forward takes all ranks."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in model.parameters())


def check_cut(strategy: Strategy, model: nn.Module) -> None:
    """ArgumentError where the strategy has not cut the model yet: with efficient loading rank 0 alone has its weights then."""
    if strategy.cuts_parameters and not is_sharded(model):
        raise ArgumentError(
            "evaluate() and predict() come after train() where the model is sharded: train() cuts it over the ranks and hands out "
            "its weights; for an evaluation before the first step set eval_on_start=True."
        )


def check_devices(fsdp: bool, tensor: bool = False) -> None:
    """ArgumentError where what was asked for cannot come into force on the devices that were found; call before loading.

    `fsdp` and `tensor` are whether FSDP and tensor parallelism are asked for; the environment may ask for FSDP as well. Needs
    the process group that TrainingArguments makes.
    """
    state = PartialState()
    _check_each_has_a_device(state)
    if (fsdp or is_on(os.environ, "ACCELERATE_USE_FSDP")) and state.distributed_type in _UNSHARDED:
        raise _not_in_force("FSDP", state.distributed_type, state.num_processes, state.device)
    if tensor and state.distributed_type in _UNSHARDED:
        raise _not_in_force("tensor parallelism", state.distributed_type, state.num_processes, state.device)


def _check_each_has_a_device(state: PartialState) -> None:
    """ArgumentError where processes that were launched would train by themselves, or share devices."""
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if launched > 1 and state.num_processes == 1:
        raise ArgumentError(
            f"{launched} processes were launched and accelerate found no device for them, so that each would train by itself: "
            "run where there are devices, or set use_cpu=True (--use_cpu)."
        )
    local, devices = int(os.environ.get("LOCAL_WORLD_SIZE") or 1), _num_devices(state.device)
    if devices is not None and local > devices:
        raise ArgumentError(f"{local} processes run on this host, and it has {devices} devices: start one for each.")


def _num_devices(device: torch.device) -> int | None:
    return torch.accelerator.device_count() if device.type not in ("cpu", "mps") else None


def _not_in_force(name: str, kind: DistributedType, num_processes: int, device: torch.device) -> ArgumentError:
    return ArgumentError(
        f"{name} was asked for and is not in force: accelerate chose {kind.value} on {num_processes} processes of {device.type}; "
        f"{name} needs processes that a launcher started, each with a device of its own (docs/distributed.md)."
    )


def states_on_host(state: Any) -> bool:
    """Whether accelerate's own settings keep the optimizer's states in host memory (or on a disk) all the time."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    deepspeed, fsdp = getattr(state, "deepspeed_plugin", None), getattr(state, "fsdp_plugin", None)
    if deepspeed is not None:
        return zero_offloads(deepspeed, "offload_optimizer")
    return fsdp is not None and isinstance(fsdp.cpu_offload, CPUOffloadPolicy)


def zero_offloads(plugin: Any, section: str) -> bool:
    """Whether a section of ZeRO's settings, `offload_optimizer` or `offload_param`, names a place outside of the device."""
    config = plugin.deepspeed_config.get("zero_optimization", {}).get(section) or {}
    return config.get("device", "none") not in ("none", None)

"""Which strategy a run has: what the user asked of accelerate, and an error when that is not in force.

And what of a model that strategy puts on each device, known before anything is cut or moved.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from lowpeak.arguments import is_on
from lowpeak.errors import ArgumentError
from lowpeak.parallel.base import Replicated, fsdp_mesh, num_peers
from lowpeak.parallel.strategy import Strategy

_REPLICATED = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU)
_UNSHARDED = (DistributedType.NO, DistributedType.MULTI_CPU)
_ASKED = (
    ("ACCELERATE_USE_FSDP", "FSDP", DistributedType.FSDP),
    ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed", DistributedType.DEEPSPEED),
)


def detect_strategy(accelerator: Accelerator) -> Strategy:
    """Return the strategy for an accelerator's distributed type; ArgumentError for one that lowpeak does not run.

    FSDP or DeepSpeed that was asked for and is not in force is an error too: accelerate trains DDP in its place, whose
    memory is not what was planned with.
    """
    kind = accelerator.distributed_type
    for variable, name, wanted in _ASKED:
        if is_on(os.environ, variable) and kind != wanted:
            raise _not_in_force(name, accelerator)
    if kind == DistributedType.FSDP:
        from lowpeak.parallel.fsdp2 import Fsdp2

        return Fsdp2(accelerator)
    if kind == DistributedType.DEEPSPEED:
        from lowpeak.parallel.zero import Zero

        return Zero(accelerator)
    if num_peers(accelerator) > 1:
        from lowpeak.parallel.tensor_parallel import TensorParallel

        return TensorParallel(accelerator)
    if kind in _REPLICATED:
        return Replicated(accelerator)
    raise ArgumentError(
        f"accelerate was configured for {kind.value} on {accelerator.num_processes} processes, which lowpeak does not run: "
        "use DDP, FSDP2 or DeepSpeed ZeRO."
    )


def is_sharded(model: nn.Module) -> bool:
    """Return whether a rank holds parts of the model's parameters alone, so that a forward takes all ranks."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in model.parameters())


def check_cut(strategy: Strategy, model: nn.Module) -> None:
    """Raise ArgumentError if the strategy has not cut the model yet: with efficient loading rank 0 alone has its weights then."""
    if strategy.cuts_parameters and not is_sharded(model):
        raise ArgumentError(
            "evaluate() and predict() come after train() where the model is sharded: train() cuts it over the ranks and hands out "
            "its weights; for an evaluation before the first step set eval_on_start=True."
        )


def check_devices(fsdp: bool, tensor: bool = False) -> None:
    """Raise ArgumentError where what was asked for cannot come into force on the devices that were found; call before loading.

    `fsdp` and `tensor` are whether FSDP and tensor parallelism are asked for; the environment may ask for FSDP as well. Needs
    the process group that TrainingArguments makes.
    """
    state = PartialState()
    _check_each_has_a_device(state)
    asked = {"FSDP": fsdp or is_on(os.environ, "ACCELERATE_USE_FSDP"), "tensor parallelism": tensor}
    for name in asked:
        if asked[name] and state.distributed_type in _UNSHARDED:
            raise _not_in_force(name, state)


def _check_each_has_a_device(state: PartialState) -> None:
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if launched > 1 and state.num_processes == 1:
        raise ArgumentError(
            f"{launched} processes were launched and accelerate found no device for them, so that each would train by itself: "
            "run where there are devices, or set use_cpu=True (--use_cpu)."
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    devices = local if state.device.type in ("cpu", "mps") else torch.accelerator.device_count()
    if local > devices:
        raise ArgumentError(f"{local} processes run on this host, and it has {devices} devices: start one for each.")


def _not_in_force(name: str, state: Accelerator | PartialState) -> ArgumentError:
    return ArgumentError(
        f"{name} was asked for and is not in force: accelerate chose {state.distributed_type.value} on {state.num_processes} "
        f"processes of {state.device.type}; {name} needs processes that a launcher started, each with a device of its own "
        "(docs/distributed.md)."
    )


def states_on_host(state: Any) -> bool:
    """Return whether accelerate's own settings keep the optimizer's states in host memory (or on a disk) all the time."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    deepspeed, fsdp = getattr(state, "deepspeed_plugin", None), getattr(state, "fsdp_plugin", None)
    if deepspeed is not None:
        return zero_offloads(deepspeed, "offload_optimizer")
    return fsdp is not None and isinstance(fsdp.cpu_offload, CPUOffloadPolicy)


def zero_offloads(plugin: Any, section: str) -> bool:
    """Return whether a section of ZeRO's settings, `offload_optimizer` or `offload_param`, names a place outside of the device."""
    config = plugin.deepspeed_config.get("zero_optimization", {}).get(section) or {}
    return config.get("device", "none") not in ("none", None)


@dataclass(frozen=True)
class Shares:
    """What a rank's device holds of each parameter, of a trained one's gradient and of AdamW's states: 1 is all, 0 none."""

    weights: float = 1.0
    gradients: float = 1.0
    states: float = 1.0


def shares_of(accelerator: Accelerator) -> Shares:
    """FSDP2 cuts all three over the ranks that share a copy, ZeRO by its stage; what is kept in host memory is on no device."""
    state: Any = accelerator.state
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return _zero_shares(state.deepspeed_plugin, 1 / accelerator.num_processes)
    if accelerator.distributed_type == DistributedType.FSDP:
        mesh = fsdp_mesh(accelerator)
        # Where whole copies are kept beside each other (HSDP), each is cut over its own ranks alone.
        num_ranks = accelerator.num_processes if mesh is None else mesh.size(mesh.ndim - 1)
        part = 0.0 if states_on_host(state) else 1 / num_ranks
        return Shares(part, part, part)
    return Shares()


def _zero_shares(plugin: Any, part: float) -> Shares:
    """From stage 2 on gradients are summed where the optimizer is."""
    stage = int(plugin.zero_stage)
    states = 0.0 if zero_offloads(plugin, "offload_optimizer") else part
    weights = 0.0 if zero_offloads(plugin, "offload_param") else part
    return Shares(weights if stage == 3 else 1.0, states if stage >= 2 else 1.0, states)

"""Which strategy a run has: what the user asked of accelerate, and an error when that is not in force."""

from __future__ import annotations

import os

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from lowpeak.errors import ArgumentError
from lowpeak.strategies.replicated import Replicated
from lowpeak.strategies.strategy import Strategy

_REPLICATED = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU)


def detect_strategy(accelerator: Accelerator) -> Strategy:
    """The strategy for an accelerator's distributed type; ArgumentError for one that lowpeak does not run.

    FSDP or DeepSpeed that was asked for and is not in force is an error too: accelerate trains DDP in its place, whose
    memory is not what was planned with.
    """
    kind = accelerator.distributed_type
    _check_asked("ACCELERATE_USE_FSDP", "FSDP", kind == DistributedType.FSDP, accelerator)
    _check_asked("ACCELERATE_USE_DEEPSPEED", "DeepSpeed", kind == DistributedType.DEEPSPEED, accelerator)
    if kind == DistributedType.FSDP:
        from lowpeak.strategies.fsdp2 import Fsdp2

        return Fsdp2(accelerator)
    if kind == DistributedType.DEEPSPEED:
        from lowpeak.strategies.zero import Zero

        return Zero(accelerator)
    if kind in _REPLICATED:
        return Replicated(accelerator)
    raise ArgumentError(
        f"accelerate was configured for {kind.value} on {accelerator.num_processes} processes, which lowpeak does not run: "
        "use DDP, FSDP2 or DeepSpeed ZeRO."
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether a rank holds parts of the model's parameters alone, so that a forward takes all ranks."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in model.parameters())


def _check_asked(variable: str, name: str, in_force: bool, accelerator: Accelerator) -> None:
    asked = os.environ.get(variable, "false").lower() in ("true", "1")
    if asked and not in_force:
        raise ArgumentError(
            f"{name} was asked for ({variable}=true) and is not in force: accelerate chose "
            f"{accelerator.distributed_type.value} on {accelerator.num_processes} processes of {accelerator.device.type}; "
            f"{name} needs several processes that each have a device of their own."
        )

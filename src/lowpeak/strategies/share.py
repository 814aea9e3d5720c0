"""How much of what training takes lies on each rank's own device, known before accelerate has cut or moved anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from lowpeak.strategies.detect import states_on_host


@dataclass(frozen=True)
class Shares:
    """What a rank's device holds of each parameter, of a trained one's gradient and of AdamW's states: 1 is all, 0 none."""

    weights: float = 1.0
    gradients: float = 1.0
    states: float = 1.0


def shares_of(accelerator: Accelerator) -> Shares:
    """FSDP2 cuts all three over the ranks that share a copy, ZeRO by its stage; what is kept in host memory is on no device."""
    state: Any = accelerator.state
    ranks, on_host = accelerator.num_processes, states_on_host(state)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        stage, part = int(state.deepspeed_plugin.zero_stage), 1 / ranks
        return Shares(part if stage == 3 else 1.0, part if stage >= 2 else 1.0, 0.0 if on_host else part)
    if accelerator.distributed_type == DistributedType.FSDP:
        part = 0.0 if on_host else 1 / _ranks_of_a_copy(accelerator)
        return Shares(part, part, part)
    return Shares()


def _ranks_of_a_copy(accelerator: Any) -> int:
    """Ranks that FSDP2 cuts over: all, but where whole copies are kept beside each other (HSDP) those of one."""
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is None:
        return int(accelerator.num_processes)
    cut = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    return int(cut.size(cut.ndim - 1))

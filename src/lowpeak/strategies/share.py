"""How much of what training takes lies on each rank's own device, known before accelerate has cut or moved anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from lowpeak.strategies.detect import states_on_host, zero_offloads


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
        part = 0.0 if states_on_host(state) else 1 / _ranks_of_a_copy(accelerator)
        return Shares(part, part, part)
    return Shares()


def _zero_shares(plugin: Any, part: float) -> Shares:
    """From stage 2 on gradients are summed where the optimizer is."""
    stage = int(plugin.zero_stage)
    states = 0.0 if zero_offloads(plugin, "offload_optimizer") else part
    weights = 0.0 if zero_offloads(plugin, "offload_param") else part
    return Shares(weights if stage == 3 else 1.0, states if stage >= 2 else 1.0, states)


def _ranks_of_a_copy(accelerator: Any) -> int:
    """Ranks that FSDP2 cuts over: all, but where whole copies are kept beside each other (HSDP) those of one."""
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is None:
        return int(accelerator.num_processes)
    cut = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    return int(cut.size(cut.ndim - 1))

"""What DeepSpeed's optimizer holds, as ranges of the model's parameters; all of its names that this needs are here.

Each rank's part of a group of parameters is one flat fp32 tensor, which an inner torch optimizer steps. Stages 1 and 2 cut the
group laid out flat, so that a parameter may lie on several ranks in uneven parts; stage 3 cuts each parameter evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.errors import CheckpointError
from lowpeak.ranks import Ranks
from lowpeak.strategies.shards import load_shards, read_saved
from lowpeak.strategies.states import (
    WEIGHT,
    Fragment,
    Saved,
    TrainingState,
    copied,
    group_options,
    put_options,
    torch_idle,
)

_COUNTED = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


@dataclass(frozen=True)
class Master:
    """Values [start, start + count) of a parameter of `numel`, which are [place, place + count) of a flat fp32 tensor."""

    name: str
    numel: int
    start: int
    count: int
    flat: Tensor
    place: int

    def cut(self, flat: Tensor) -> Fragment:
        return Fragment(self.name, self.numel, self.start, flat.detach().narrow(0, self.place, self.count))


def zero_state(engine: Any, stage: int, named: Mapping[str, nn.Parameter]) -> TrainingState:
    """Return this rank's part: fp32 weights, the optimizer's states, loss scale and counts."""
    inner = engine.optimizer.optimizer
    state = TrainingState(options=group_options(inner), engine=_engine_numbers(engine))
    for master in _masters(engine.optimizer, stage, named):
        state.add_range(f"{WEIGHT}/{master.name}", master.cut(master.flat))
        state.add(master.name, inner.state.get(master.flat, {}), master.flat, master.cut)
    return state


def load_zero_state(checkpoint: Path, engine: Any, stage: int, named: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Fill this rank's part of the optimizer, whatever ranks wrote it; then the model's weights from it, on all ranks."""
    saved = read_saved(checkpoint, ranks)
    optimizer = engine.optimizer
    inner = optimizer.optimizer
    put_options(inner, saved.options)
    for master in _masters(optimizer, stage, named):
        _make_states(inner.state[master.flat], master, saved)
    load_shards(checkpoint, saved, zero_state(engine, stage, named).fragments)
    for name in _COUNTED:
        if name in saved.engine:
            setattr(engine, name, saved.engine[name])
    for key, value in saved.engine.get("loss_scaler", {}).items():
        setattr(optimizer.loss_scaler, key, value)
    if engine.lr_scheduler is not None and "schedule" in saved.engine:
        engine.lr_scheduler.load_state_dict(saved.engine["schedule"])
    if stage < 3:
        optimizer.update_lp_params()
    else:
        _refresh_model(optimizer, stage, named)


def zero_idle(engine: Any) -> list[Tensor]:
    """Return what the optimizer reads in its step alone: fp32 weights, their states, gradients of which it keeps flat ranges."""
    optimizer = engine.optimizer
    stage3 = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    masters = optimizer.single_partition_of_fp32_groups if stage3 is None else stage3
    gradients = [getattr(optimizer, "grad_partitions_flat_buffer", None)]
    for group in optimizer.averaged_gradients.values():
        gradients += group or []
    return [*masters, *torch_idle(optimizer.optimizer), *(each for each in gradients if isinstance(each, Tensor))]


def _masters(optimizer: Any, stage: int, named: Mapping[str, nn.Parameter]) -> Iterator[Master]:
    """Where this rank's values of each parameter lie in the optimizer's flat tensors."""
    for name, parameter in named.items():
        master = _cut_parameter(optimizer, name, parameter) if stage == 3 else _cut_group(optimizer, name, parameter)
        if master is not None:
            if master.flat.numel() < master.place + master.count:
                raise CheckpointError(
                    "optimizer states that DeepSpeed keeps on NVMe cannot be saved: offload them to the CPU "
                    "(offload_optimizer.device: cpu)."
                )
            yield master


def _cut_parameter(optimizer: Any, name: str, parameter: Any) -> Master | None:
    """Stage 3: rank r has values [r * c, (r + 1) * c), the last ones padded."""
    group, place, chunk = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = torch.distributed.get_rank(parameter.ds_process_group) * chunk
    count = max(0, min(chunk, parameter.ds_numel - start))
    flat = optimizer.fp32_partitioned_groups_flat[group]
    return Master(name, parameter.ds_numel, start, count, flat, place) if count else None


def _cut_group(optimizer: Any, name: str, parameter: Any) -> Master | None:
    """Stages 1 and 2: what of the parameter falls into this rank's part of its group."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
    (flat,) = optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
    return Master(name, parameter.numel(), here.start, here.numel, flat, there.start)


def _make_states(states: dict[str, Any], master: Master, saved: Saved) -> None:
    """The states of a flat tensor that a checkpoint holds, unfilled: stages 1 and 2 make them at their first step."""
    for key, dtype in saved.states.get(master.name, {}).items():
        if key not in states:
            states[key] = torch.zeros_like(master.flat, dtype=dtype, requires_grad=False)
    for key, value in saved.others.get(master.name, {}).items():
        kept = states.get(key)
        if isinstance(kept, Tensor) and isinstance(value, Tensor):
            kept.copy_(value)
        else:
            states[key] = copied(value)


def _refresh_model(optimizer: Any, stage: int, named: Mapping[str, Any]) -> None:
    """Stage 3: this rank's range of each parameter from the optimizer's; those that stay whole are gathered again."""
    optimizer.checkpoint_event_prologue()
    with torch.no_grad():
        for master in _masters(optimizer, stage, named):
            local = named[master.name].ds_tensor.view(-1)
            local[: master.count].copy_(master.cut(master.flat).values)
    optimizer.checkpoint_event_epilogue()


def _engine_numbers(engine: Any) -> dict[str, Any]:
    numbers: dict[str, Any] = {name: getattr(engine, name) for name in _COUNTED}
    scaler = vars(engine.optimizer.loss_scaler) if hasattr(engine.optimizer, "loss_scaler") else {}
    numbers["loss_scaler"] = {k: v for k, v in scaler.items() if isinstance(v, int | float)}
    if engine.lr_scheduler is not None:
        numbers["schedule"] = engine.lr_scheduler.state_dict()
    return numbers

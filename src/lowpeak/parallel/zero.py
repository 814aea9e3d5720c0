"""DeepSpeed ZeRO: stage 1 shards the optimizer's states, stage 2 gradients too, stage 3 the parameters as well.

What DeepSpeed's optimizer holds is saved as ranges of the model's parameters. Each rank's part of a group of parameters is one
flat fp32 tensor, which an inner torch optimizer steps. Stages 1 and 2 cut the group laid out flat, so that a parameter may lie
on several ranks in uneven parts; stage 3 cuts each parameter evenly. All of DeepSpeed's names are in this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from lowpeak.errors import CheckpointError
from lowpeak.parallel.base import Accelerated
from lowpeak.parallel.checkpoint_shards import load_shards, read_saved, save_shards
from lowpeak.parallel.checkpoint_state import (
    WEIGHT,
    Fragment,
    Saved,
    TrainingState,
    copied,
    group_options,
    put_options,
    torch_idle,
    trained,
)
from lowpeak.parallel.flat_shard import FlatShard
from lowpeak.parallel.frozen_models import freeze
from lowpeak.parallel.strategy import Frozen

_COUNTED = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class Zero(Accelerated):
    """DeepSpeed's engine, made by accelerate. It clips and updates by itself, in `own_step`."""

    cuts_states = True

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._stage = int(accelerator.state.deepspeed_plugin.zero_stage)
        self.cuts_parameters = self._stage == 3

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        self._accelerator.gradient_state._set_sync_gradients(last)
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def own_grad_norm(self) -> Tensor | None:
        optimizer = self._engine.optimizer
        if self._stage == 3:
            norm = torch.linalg.vector_norm(torch.stack(optimizer._get_norm_groups()))
        else:
            norm = torch.as_tensor(optimizer.scaled_global_norm())
        return norm / optimizer.loss_scale

    def own_step(self) -> None:
        self._engine.step()

    def idle(self, model: nn.Module, optimizer: Any) -> list[Tensor]:
        """Return what the optimizer reads in its step alone: fp32 weights, their states, gradients of which it keeps ranges."""
        if self._accelerator.deepspeed_engine_wrapped is None:
            return []
        zero = self._engine.optimizer
        stage3 = getattr(zero, "fp32_partitioned_groups_flat", None)
        masters = zero.single_partition_of_fp32_groups if stage3 is None else stage3
        gradients = [getattr(zero, "grad_partitions_flat_buffer", None)]
        for group in zero.averaged_gradients.values():
            gradients += group or []
        return [*masters, *torch_idle(zero.optimizer), *(each for each in gradients if isinstance(each, Tensor))]

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
        named = trained(self._unwrapped(model))
        save_shards(checkpoint, _state_of(self._engine, self._stage, named), self.ranks.processes)

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        """Fill this rank's part of the optimizer, whatever ranks wrote it; then the model's weights from it, on all ranks."""
        engine, stage, named = self._engine, self._stage, trained(self._unwrapped(model))
        saved, inner = read_saved(checkpoint, self.ranks.processes), engine.optimizer.optimizer
        put_options(inner, saved.options)
        for master in _masters(engine.optimizer, stage, named):
            _make_states(inner.state[master.flat], master, saved)
        load_shards(checkpoint, saved, _state_of(engine, stage, named).fragments)
        for name in _COUNTED:
            if name in saved.engine:
                setattr(engine, name, saved.engine[name])
        for key, value in saved.engine.get("loss_scaler", {}).items():
            setattr(engine.optimizer.loss_scaler, key, value)
        if engine.lr_scheduler is not None and "schedule" in saved.engine:
            engine.lr_scheduler.load_state_dict(saved.engine["schedule"])
        if stage < 3:
            engine.optimizer.update_lp_params()
        else:
            _refresh_model(engine.optimizer, named)

    def prepare_frozen(self, model: nn.Module, room: int, on_host: bool) -> Frozen:
        """Stage 3 cuts it as it cuts the policy, and no engine is made for it; below, a replica where there is `room`."""
        if self._stage < 3:
            return super().prepare_frozen(model, room, on_host)
        import deepspeed

        if not any(hasattr(parameter, "ds_tensor") for parameter in freeze(model).parameters()):  # else cut on loading
            config = self._accelerator.state.deepspeed_plugin.deepspeed_config
            place = {"remote_device": "cpu", "pin_memory": True} if on_host else {}
            deepspeed.zero.Init(module=model, config_dict_or_path=config, **place)
        return self._frozen(model)

    @property
    def _engine(self) -> Any:
        wrapped = self._accelerator.deepspeed_engine_wrapped
        assert wrapped is not None, "the policy is prepared"
        return wrapped.engine

    def _shard(self, parameter: Any) -> FlatShard | None:
        """A parameter that stage 3 cut (DeepSpeed's names); below, what `fully_shard` cut."""
        if not hasattr(parameter, "ds_tensor"):
            return super()._shard(parameter)
        local = parameter.ds_tensor.detach().view(-1)
        return FlatShard(parameter.ds_shape, local.numel(), local, local.dtype, self._device)


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


def _state_of(engine: Any, stage: int, named: Mapping[str, nn.Parameter]) -> TrainingState:
    inner = engine.optimizer.optimizer
    state = TrainingState(options=group_options(inner), engine=_engine_numbers(engine))
    for master in _masters(engine.optimizer, stage, named):
        state.add_range(f"{WEIGHT}/{master.name}", master.cut(master.flat))
        state.add(master.name, inner.state.get(master.flat, {}), master.flat, master.cut)
    return state


def _masters(optimizer: Any, stage: int, named: Mapping[str, nn.Parameter]) -> Iterator[Master]:
    """Yield where this rank's values of each parameter lie in the optimizer's flat tensors."""
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
    """Make the states of a flat tensor that a checkpoint holds, unfilled: stages 1 and 2 make them at their first step."""
    for key, dtype in saved.states.get(master.name, {}).items():
        if key not in states:
            states[key] = torch.zeros_like(master.flat, dtype=dtype, requires_grad=False)
    for key, value in saved.others.get(master.name, {}).items():
        kept = states.get(key)
        if isinstance(kept, Tensor) and isinstance(value, Tensor):
            kept.copy_(value)
        else:
            states[key] = copied(value)


def _refresh_model(optimizer: Any, named: Mapping[str, Any]) -> None:
    """Stage 3: this rank's range of each parameter from the optimizer's; those that stay whole are gathered again."""
    optimizer.checkpoint_event_prologue()
    with torch.no_grad():
        for master in _masters(optimizer, 3, named):
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

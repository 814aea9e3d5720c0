"""DeepSpeed ZeRO: stage 1 shards the optimizer's states, stage 2 gradients too, stage 3 the parameters as well.

DeepSpeed's optimizer is saved as ranges of the model's parameters. Each rank's part of a parameter group is one flat fp32 tensor,
the master weights, which an inner torch optimizer steps. Stages 1 and 2 shard the flattened group, so several ranks may have
uneven parts of one parameter; stage 3 shards each parameter evenly. All of DeepSpeed's names are in this file.
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
from lowpeak.heads import transformers_model
from lowpeak.parallel.base import AccelerateStrategy, freeze
from lowpeak.parallel.checkpoint_shards import load_shards, read_saved_state, save_shards
from lowpeak.parallel.checkpoint_state import (
    WEIGHT,
    Fragment,
    SavedState,
    TrainingState,
    clone_if_tensor,
    group_options,
    optimizer_tensors,
    set_group_options,
    trained_parameters,
)
from lowpeak.parallel.parameters import FlatShard
from lowpeak.parallel.partial_gather import decoder_layers
from lowpeak.parallel.strategy import FrozenModel

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class Zero(AccelerateStrategy):
    """DeepSpeed's engine, created by accelerate; it clips and updates by itself, in `deepspeed_step`."""

    shards_states = True

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._stage = int(accelerator.state.deepspeed_plugin.zero_stage)
        self.shards_parameters = self._stage == 3

    def preparing(self, model: nn.Module) -> AbstractContextManager[None]:
        if self._stage == 3:
            _gather_whole_layers(model)
        return nullcontext()

    def micro_batch_context(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        self._accelerator.gradient_state._set_sync_gradients(last)
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def deepspeed_grad_norm(self) -> Tensor | None:
        optimizer = self._engine.optimizer
        if self._stage == 3:
            norm = torch.linalg.vector_norm(torch.stack(optimizer._get_norm_groups()))
        else:
            norm = torch.as_tensor(optimizer.scaled_global_norm())
        return norm / optimizer.loss_scale

    def deepspeed_step(self) -> None:
        self._engine.step()

    def offloadable_tensors(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        if self._accelerator.deepspeed_engine_wrapped is None:
            return []
        # Only the step reads the fp32 master weights, their states, and the gradients.
        zero = self._engine.optimizer
        stage3 = getattr(zero, "fp32_partitioned_groups_flat", None)
        masters = zero.single_partition_of_fp32_groups if stage3 is None else stage3
        gradients = [getattr(zero, "grad_partitions_flat_buffer", None)]
        for group in zero.averaged_gradients.values():
            gradients += group or []
        return [*masters, *optimizer_tensors(zero.optimizer), *(each for each in gradients if isinstance(each, Tensor))]

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        params = trained_parameters(self._unwrapped(model))
        save_shards(checkpoint, _training_state(self._engine, self._stage, params), self.ranks.processes)

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        engine, stage, params = self._engine, self._stage, trained_parameters(self._unwrapped(model))
        saved, inner = read_saved_state(checkpoint, self.ranks.processes), engine.optimizer.optimizer
        set_group_options(inner, saved.options)
        for master in _master_ranges(engine.optimizer, stage, params):
            _allocate_states(inner.state[master.flat], master, saved)
        load_shards(checkpoint, saved, _training_state(engine, stage, params).fragments)
        for name in _COUNTERS:
            if name in saved.engine:
                setattr(engine, name, saved.engine[name])
        for key, value in saved.engine.get("loss_scaler", {}).items():
            setattr(engine.optimizer.loss_scaler, key, value)
        if engine.lr_scheduler is not None and "schedule" in saved.engine:
            engine.lr_scheduler.load_state_dict(saved.engine["schedule"])
        # The checkpoint has the master weights alone; copy them to the model on all ranks.
        if stage < 3:
            engine.optimizer.update_lp_params()
        else:
            _copy_masters_to_model(engine.optimizer, params)

    def prepare_frozen(self, model: nn.Module, free_bytes: int, on_host: bool) -> FrozenModel:
        if self._stage < 3:
            return super().prepare_frozen(model, free_bytes, on_host)
        import deepspeed

        # A model that was loaded under ZeRO-3 is sharded already.
        if not any(hasattr(parameter, "ds_tensor") for parameter in freeze(model).parameters()):
            config = self._accelerator.state.deepspeed_plugin.deepspeed_config
            host_options = {"remote_device": "cpu", "pin_memory": True} if on_host else {}
            deepspeed.zero.Init(module=model, config_dict_or_path=config, **host_options)
        return self._frozen(model)

    @property
    def _engine(self) -> Any:
        wrapped = self._accelerator.deepspeed_engine_wrapped
        assert wrapped is not None, "accelerate has prepared the policy"
        return wrapped.engine

    def _shard(self, parameter: Any) -> FlatShard | None:
        if not hasattr(parameter, "ds_tensor"):
            return super()._shard(parameter)
        local = parameter.ds_tensor.detach().view(-1)
        return FlatShard(parameter.ds_shape, local.numel(), local, local.dtype, self._device)


def _gather_whole_layers(model: nn.Module) -> None:
    """Let ZeRO-3 gather a layer whole if ranks call its parts differently often, or read them without a call."""
    from deepspeed.utils import set_z3_leaf_module, z3_leaf_module

    # A mixer runs as often as its rank's sequences need; Gemma 3n reads the weights of `altup` without a call.
    whole = [
        layer
        for layer in decoder_layers(model)
        if (hasattr(layer, "altup") or any(isinstance(part, nn.Conv1d) for part in layer.modules()))
        and not z3_leaf_module(layer)  # from an earlier train()
    ]
    for layer in whole:
        set_z3_leaf_module(layer, True)
    # DeepSpeed waits for the gradient of a layer's input; under adapters the first layer's input has none.
    if whole:
        transformers_model(model).enable_input_require_grads()


@dataclass(frozen=True)
class MasterRange:
    """Values [start, start + count) of a parameter; in `flat`, an fp32 tensor, they begin at `flat_start`."""

    name: str
    numel: int
    start: int
    count: int
    flat: Tensor
    flat_start: int

    def fragment(self, flat: Tensor) -> Fragment:
        return Fragment(self.name, self.numel, self.start, flat.detach().narrow(0, self.flat_start, self.count))


def _training_state(engine: Any, stage: int, params: Mapping[str, nn.Parameter]) -> TrainingState:
    inner = engine.optimizer.optimizer
    state = TrainingState(options=group_options(inner), engine=_engine_state(engine))
    for master in _master_ranges(engine.optimizer, stage, params):
        state.add_fragment(f"{WEIGHT}/{master.name}", master.fragment(master.flat))
        state.add(master.name, inner.state.get(master.flat, {}), master.flat, master.fragment)
    return state


def _master_ranges(optimizer: Any, stage: int, params: Mapping[str, nn.Parameter]) -> Iterator[MasterRange]:
    """Yield the position of this rank's values of each parameter in the optimizer's flat tensors."""
    for name, parameter in params.items():
        master = (
            _stage3_range(optimizer, name, parameter) if stage == 3 else _flat_group_range(optimizer, name, parameter)
        )
        if master is not None:
            if master.flat.numel() < master.flat_start + master.count:
                raise CheckpointError(
                    "optimizer states that DeepSpeed offloads to NVMe cannot be saved: offload them to the CPU "
                    "(offload_optimizer.device: cpu)."
                )
            yield master


def _stage3_range(optimizer: Any, name: str, parameter: Any) -> MasterRange | None:
    """Return this rank's range under stage 3: rank r has [r * c, (r + 1) * c), less the padding at the end."""
    group, flat_start, chunk = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = torch.distributed.get_rank(parameter.ds_process_group) * chunk
    count = max(0, min(chunk, parameter.ds_numel - start))
    flat = optimizer.fp32_partitioned_groups_flat[group]
    return MasterRange(name, parameter.ds_numel, start, count, flat, flat_start) if count else None


def _flat_group_range(optimizer: Any, name: str, parameter: Any) -> MasterRange | None:
    """Return the parameter's range in this rank's part of its group, under stages 1 and 2."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    in_param, in_group = mapping.lp_fragment_address, mapping.hp_fragment_address
    (flat,) = optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
    return MasterRange(name, parameter.numel(), in_param.start, in_param.numel, flat, in_group.start)


def _allocate_states(states: dict[str, Any], master: MasterRange, saved: SavedState) -> None:
    """Allocate a flat tensor's states from the checkpoint; DeepSpeed may create them only at its first step."""
    for key, dtype in saved.states.get(master.name, {}).items():
        if key not in states:
            states[key] = torch.zeros_like(master.flat, dtype=dtype, requires_grad=False)
    for key, value in saved.others.get(master.name, {}).items():
        state = states.get(key)
        if isinstance(state, Tensor) and isinstance(value, Tensor):
            state.copy_(value)
        else:
            states[key] = clone_if_tensor(value)


def _copy_masters_to_model(optimizer: Any, params: Mapping[str, Any]) -> None:
    """Copy the master weights to this rank's shards under stage 3; DeepSpeed gathers its persistent parameters again."""
    optimizer.checkpoint_event_prologue()
    with torch.no_grad():
        for master in _master_ranges(optimizer, 3, params):
            local = params[master.name].ds_tensor.view(-1)
            local[: master.count].copy_(master.fragment(master.flat).values)
    optimizer.checkpoint_event_epilogue()


def _engine_state(engine: Any) -> dict[str, Any]:
    numbers: dict[str, Any] = {name: getattr(engine, name) for name in _COUNTERS}
    scaler = vars(engine.optimizer.loss_scaler) if hasattr(engine.optimizer, "loss_scaler") else {}
    numbers["loss_scaler"] = {k: v for k, v in scaler.items() if isinstance(v, int | float)}
    if engine.lr_scheduler is not None:
        numbers["schedule"] = engine.lr_scheduler.state_dict()
    return numbers

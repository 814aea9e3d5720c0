"""DeepSpeed ZeRO: stage 1 shards the optimizer's states, stage 2 gradients too, stage 3 the parameters as well."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from lowpeak.strategies.accelerated import Accelerated
from lowpeak.strategies.flat import FlatShard
from lowpeak.strategies.frozen import freeze
from lowpeak.strategies.shards import save_shards
from lowpeak.strategies.states import trained
from lowpeak.strategies.strategy import Frozen
from lowpeak.strategies.zero_states import load_zero_state, zero_idle, zero_state


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
        optimizer = self._engine.optimizer  # the names below are DeepSpeed's
        if self._stage == 3:
            norm = torch.linalg.vector_norm(torch.stack(optimizer._get_norm_groups()))
        else:
            norm = torch.as_tensor(optimizer.scaled_global_norm())
        return norm / optimizer.loss_scale

    def own_step(self) -> None:
        self._engine.step()

    def idle(self, model: nn.Module, optimizer: Any) -> list[Tensor]:
        return [] if self._accelerator.deepspeed_engine_wrapped is None else zero_idle(self._engine)

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
        named = trained(self._unwrapped(model))
        save_shards(checkpoint, zero_state(self._engine, self._stage, named), self.ranks.processes)

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        named = trained(self._unwrapped(model))
        load_zero_state(checkpoint, self._engine, self._stage, named, self.ranks.processes)

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

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

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._stage = int(accelerator.state.deepspeed_plugin.zero_stage)

    @property
    def cuts_parameters(self) -> bool:
        """Stage 3 does."""
        return self._stage == 3

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch's forward and backward: the engine is told whether it is the step's `last`."""
        self._accelerator.gradient_state._set_sync_gradients(last)
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the loss's gradients to the engine's, averaged over ranks."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def own_grad_norm(self) -> Tensor | None:
        """The norm of the gradients that the engine has reduced; DeepSpeed's own names."""
        optimizer = self._engine.optimizer
        if self._stage == 3:
            norm = torch.linalg.vector_norm(torch.stack(optimizer._get_norm_groups()))
        else:
            norm = torch.as_tensor(optimizer.scaled_global_norm())
        return norm / optimizer.loss_scale

    def own_step(self) -> None:
        """The engine clips, updates and clears."""
        self._engine.step()

    def idle(self, model: nn.Module, optimizer: Any) -> list[Tensor]:
        """The engine's gradients, its fp32 weights and their states; none before it was made."""
        return [] if self._accelerator.deepspeed_engine_wrapped is None else zero_idle(self._engine)

    @property
    def cuts_states(self) -> bool:
        """Yes: each rank has ranges of the optimizer's states, whatever the stage."""
        return True

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
        """Each rank writes its ranges of the optimizer's weights and their states."""
        named = trained(self._accelerator.unwrap_model(model))
        save_shards(checkpoint, zero_state(self._engine, self._stage, named), self._ranks.processes)

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        """Each rank reads its ranges, whatever ranks wrote them; then the model gets its weights from the optimizer's."""
        named = trained(self._accelerator.unwrap_model(model))
        load_zero_state(checkpoint, self._engine, self._stage, named, self._ranks.processes)

    def prepare_frozen(self, model: nn.Module, room: int, on_host: bool) -> Frozen:
        """Stage 3 cuts it as it cuts the policy, and no engine is made for it; below, a replica where there is `room`."""
        if self._stage < 3:
            return super().prepare_frozen(model, room, on_host)
        model = _partitioned(freeze(model), self._accelerator.state.deepspeed_plugin.deepspeed_config, on_host)
        return Frozen(model, lambda: self._ready(model))

    @property
    def _engine(self) -> Any:
        """DeepSpeed's engine of the policy."""
        wrapped = self._accelerator.deepspeed_engine_wrapped
        assert wrapped is not None, "the policy is prepared"
        return wrapped.engine

    def _shard(self, parameter: Any) -> FlatShard | None:
        """A parameter that stage 3 cut (DeepSpeed's names); below, what `fully_shard` cut."""
        if not hasattr(parameter, "ds_tensor"):
            return super()._shard(parameter)
        local = parameter.ds_tensor.detach().view(-1)
        return FlatShard(parameter.ds_shape, local.numel(), local, local.dtype, self._device)


def _partitioned(model: nn.Module, config: Any, on_host: bool) -> nn.Module:
    """The model cut by stage 3, if it was not when it was loaded."""
    import deepspeed

    if not any(hasattr(parameter, "ds_tensor") for parameter in model.parameters()):
        place = {"remote_device": "cpu", "pin_memory": True} if on_host else {}
        deepspeed.zero.Init(module=model, config_dict_or_path=config, **place)
    return model

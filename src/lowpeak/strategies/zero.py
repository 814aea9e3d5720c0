"""DeepSpeed ZeRO: stage 1 shards the optimizer's states, stage 2 gradients too, stage 3 the parameters as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from lowpeak.ranks import Ranks
from lowpeak.records import WeightSlice
from lowpeak.strategies.flat import FlatShard, ranges
from lowpeak.strategies.gathered import gathered
from lowpeak.strategies.outgoing import Weights, layout, outgoing
from lowpeak.strategies.shards import save_shards
from lowpeak.strategies.states import trained
from lowpeak.strategies.zero_states import load_zero_state, zero_state


class Zero:
    """DeepSpeed's engine, made by accelerate. Its own step clips and updates: `step` lets it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._ranks = Ranks(accelerator.device)
        self.stage = int(accelerator.state.deepspeed_plugin.zero_stage)

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        return self._ranks

    @property
    def promised_scale(self) -> float | None:
        """None: gradients are reduced over ranks on their way."""
        return None

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine of the policy."""
        wrapped = self._accelerator.deepspeed_engine_wrapped
        assert wrapped is not None, "the policy is prepared"
        return wrapped.engine

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch's forward and backward: the engine is told whether it is the step's `last`."""
        self._accelerator.gradient_state._set_sync_gradients(last)
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the loss's gradients to the engine's, averaged over ranks."""
        self.engine.backward(loss, scale_wrt_gas=False)

    def own_grad_norm(self) -> Tensor | None:
        """The norm of the gradients that the engine has reduced; DeepSpeed's own names."""
        optimizer = self.engine.optimizer
        if self.stage == 3:
            norm = torch.linalg.vector_norm(torch.stack(optimizer._get_norm_groups()))
        else:
            norm = torch.as_tensor(optimizer.scaled_global_norm())
        return norm / optimizer.loss_scale

    def own_step(self) -> None:
        """The engine clips, updates and clears."""
        self.engine.step()

    @contextmanager
    def hold(self, model: nn.Module, budget: int | None) -> Iterator[nn.Module]:
        """Below stage 3 the whole model; else as many whole layers as `budget` bytes allow; see `gathered`."""
        inner = self._accelerator.unwrap_model(model)
        with gathered(inner, self._shard, budget, self._ranks, self._accelerator.device):
            yield inner

    def slices(
        self, model: nn.Module, max_bytes: int, dtype: torch.dtype | None, weights: Weights = "merged"
    ) -> Iterator[WeightSlice]:
        """The parameters in flat ranges of at most `max_bytes`; the owner of a range broadcasts it."""
        return ranges(outgoing(self._accelerator.unwrap_model(model), self._shard, weights), max_bytes, dtype)

    def layout(self, model: nn.Module, weights: Weights = "merged") -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, whole shapes and dtypes of what `slices` gives."""
        return layout(self._accelerator.unwrap_model(model), self._shard, weights)

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's flat range of each parameter; below stage 3 the whole."""
        named = self._accelerator.unwrap_model(model).named_parameters()
        return {name: getattr(p, "ds_tensor", p).detach() for name, p in named}

    @property
    def sharded(self) -> bool:
        """Yes: each rank has ranges of the optimizer's states, whatever the stage."""
        return True

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
        """Each rank writes its ranges of the optimizer's weights and their states."""
        named = trained(self._accelerator.unwrap_model(model))
        save_shards(checkpoint, zero_state(self.engine, self.stage, named), self._ranks)

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        """Each rank reads its ranges, whatever ranks wrote them; then the model gets its weights from the optimizer's."""
        named = trained(self._accelerator.unwrap_model(model))
        load_zero_state(checkpoint, self.engine, self.stage, named, self._ranks)

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        """Sharded layer by layer like the policy."""
        return model.requires_grad_(False).eval()

    def _shard(self, parameter: Any) -> FlatShard | None:
        """A parameter that stage 3 cut; DeepSpeed's names."""
        if not hasattr(parameter, "ds_tensor"):
            return None
        local = parameter.ds_tensor.detach().view(-1)
        return FlatShard(parameter.ds_shape, local.numel(), local, local.dtype, self._accelerator.device)

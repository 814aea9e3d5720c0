"""One device, and its copies under DDP: every rank holds the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from lowpeak.ranks import Ranks
from lowpeak.records import WeightSlice
from lowpeak.strategies.flat import ranges
from lowpeak.strategies.generating import generating
from lowpeak.strategies.outgoing import Weights, layout, outgoing
from lowpeak.strategies.shards import load_torch_state


class Replicated:
    """The whole model on each rank. One device is the degenerate case."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._ranks = Ranks(accelerator.device)

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        return self._ranks

    @property
    def promised_scale(self) -> float | None:
        """One over accelerate's accumulation on one device; None for several ranks, or where fp16 scales the loss."""
        alone = self._accelerator.distributed_type == DistributedType.NO
        if not alone or self._ranks.world_size != 1 or self._accelerator.scaler is not None:
            return None
        return 1.0 / self._accelerator.gradient_accumulation_steps

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch's forward and backward: unless it is the step's `last`, ranks do not average yet."""
        self._accelerator.gradient_state._set_sync_gradients(last)
        return nullcontext() if last else self._accelerator.no_sync(model)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the loss's gradients to the parameters', averaged over ranks after the step's `last` micro-batch."""
        self._accelerator.backward(loss)

    def own_grad_norm(self) -> Tensor | None:
        """None: gradients are the parameters' own."""
        return None

    def own_step(self) -> None:
        """Nothing: the optimizer steps by itself."""

    @contextmanager
    def hold(self, model: nn.Module, budget: int | None) -> Iterator[nn.Module]:
        """The unwrapped model in eval mode without activation checkpointing; `budget` is moot, all of it is here.

        Restores each module's own mode and checkpointing flag, however the context is left.
        """
        inner = self._accelerator.unwrap_model(model)
        with generating(inner):
            yield inner

    def slices(
        self, model: nn.Module, max_bytes: int, dtype: torch.dtype | None, weights: Weights = "merged"
    ) -> Iterator[WeightSlice]:
        """The parameters in flat ranges of at most `max_bytes`, cast to `dtype`; tied weights once."""
        return ranges(outgoing(self._accelerator.unwrap_model(model), lambda _: None, weights), max_bytes, dtype)

    def layout(self, model: nn.Module, weights: Weights = "merged") -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, whole shapes and dtypes of what `slices` gives."""
        return layout(self._accelerator.unwrap_model(model), lambda _: None, weights)

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters themselves: every rank's shard is the whole."""
        return {name: p.detach() for name, p in self._accelerator.unwrap_model(model).named_parameters()}

    @property
    def sharded(self) -> bool:
        """No: rank 0 has all that a checkpoint needs."""
        return False

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
        """Nothing: rank 0 writes weights and optimizer states as transformers does."""

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        """Weights and optimizer states from what several ranks wrote."""
        load_torch_state(checkpoint, self._accelerator.unwrap_model(model), optimizer, self._ranks)

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        """The model on the device, frozen, in eval mode, under the policy's autocast: its log-probs round alike.

        A quantised model stays where it was put.
        """
        model = model.requires_grad_(False).eval()
        if getattr(model, "is_quantized", False):
            return model
        return self._accelerator.prepare_model(model, evaluation_mode=True)

"""One device, and its copies under DDP: every rank holds the whole model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from accelerate.utils import DistributedType
from torch import nn

from lowpeak.strategies.accelerated import Accelerated


class Replicated(Accelerated):
    """The whole model on each rank. One device is the degenerate case."""

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

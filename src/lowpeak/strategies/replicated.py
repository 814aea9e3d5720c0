"""One device, and its copies under DDP: every rank holds the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from lowpeak.ranks import Ranks
from lowpeak.records import WeightSlice
from lowpeak.strategies.frozen import Frozen
from lowpeak.strategies.generating import generating
from lowpeak.strategies.replicas import Replicas


class Replicated:
    """The whole model on each rank. One device is the degenerate case."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._ranks = Ranks(accelerator.device)
        self._replicas = Replicas(accelerator, self._ranks)

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
    def hold(self, model: nn.Module, budget: int | None, whole_head: bool = False) -> Iterator[nn.Module]:
        """The unwrapped model in eval mode without activation checkpointing; `budget` is moot, all of it is here.

        Restores each module's own mode and checkpointing flag, however the context is left.
        """
        inner = self._accelerator.unwrap_model(model)
        with generating(inner):
            yield inner

    def slices(self, model: nn.Module, max_bytes: int, dtype: torch.dtype | None) -> Iterator[WeightSlice]:
        """Every parameter in flat ranges of at most `max_bytes`, cast to `dtype`; tied weights once."""
        for name, parameter in self._accelerator.unwrap_model(model).named_parameters():
            flat = parameter.detach().reshape(-1)
            target = dtype or flat.dtype
            count = max(1, max_bytes // target.itemsize)
            for start in range(0, flat.numel(), count):
                values = flat[start : start + count].to(target)
                yield WeightSlice(name, tuple(parameter.shape), target, start, values)

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters themselves: every rank's shard is the whole."""
        return {name: p.detach() for name, p in self._accelerator.unwrap_model(model).named_parameters()}

    def prepare_frozen(self, model: nn.Module, room: int, on_host: bool) -> Frozen:
        """A replica on the device under the policy's autocast, so that log-probs round alike; see `Replicas`."""
        return self._replicas.prepare_frozen(model, room, on_host)

    def average(self, reference: nn.Module, policy: nn.Module, share: float) -> None:
        """reference = share * policy + (1 - share) * reference, on this rank's ranges of a sharded reference."""
        self._replicas.average(reference, self._accelerator.unwrap_model(policy), share)

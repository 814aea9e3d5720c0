"""What of a trainer rests in host memory while a rollout is made (`offload_during_rollout`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lowpeak.memory import LEAST_BYTES, HostMover, Rest
from lowpeak.parallel import Frozen, Strategy


def make_rest(
    trainer: Any, policy: nn.Module, strategy: Strategy, mover: HostMover | None = None, least_bytes: int = LEAST_BYTES
) -> Rest:
    """Gradients and optimizer states of a trainer.

    The optimizer is made when training starts, and has no states before its first step.
    """
    mover = mover or HostMover(trainer.accelerator.device)

    def needed() -> Iterable[Tensor]:
        return _tensors(policy, strategy)

    return Rest(mover, needed, lambda: strategy.idle(policy, trainer.optimizer), least_bytes)


def resting(rest: Rest | None, strategy: Strategy, frozen: Frozen) -> Frozen:
    """A frozen model that rests too, and is on the device while it is used."""
    if rest is None:
        return frozen

    def tensors() -> Iterable[Tensor]:
        return _tensors(frozen.model, strategy)

    @contextmanager
    def ready() -> Iterator[Any]:
        with rest.here(tensors), frozen.ready() as model:
            yield model

    rest.add(tensors)
    return Frozen(frozen.model, ready)


def _tensors(model: nn.Module, strategy: Strategy) -> Iterable[Tensor]:
    return [*strategy.shards(model).values(), *model.buffers()]

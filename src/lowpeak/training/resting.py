"""What of a trainer rests in host memory while a rollout is made (`offload_during_rollout`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lowpeak.errors import ArgumentError
from lowpeak.memory.devices import has_memory
from lowpeak.memory.resting import LEAST_BYTES, DeviceHostMover, HostMover, Rest
from lowpeak.strategies.detect import states_on_host
from lowpeak.strategies.strategy import Frozen, Strategy


def check_resting(accelerator: Any, has_frozen: bool) -> None:
    """ArgumentError where nothing can leave: the device's memory is the host's, or all of it is there already."""
    if not has_memory(accelerator.device):
        raise ArgumentError("offload_during_rollout=True cannot act: the device's memory is the host's; remove it.")
    if states_on_host(accelerator.state) and not has_frozen:
        raise ArgumentError(
            "offload_during_rollout=True cannot act: the optimizer's states are in host memory already, and there is no "
            "reference and no reward model; remove it."
        )


def make_rest(
    trainer: Any, policy: nn.Module, strategy: Strategy, mover: HostMover | None = None, least_bytes: int = LEAST_BYTES
) -> Rest:
    """Gradients and optimizer states of a trainer.

    The optimizer is made when training starts, and has no states before its first step.
    """
    mover = mover or DeviceHostMover(trainer.accelerator.device)

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

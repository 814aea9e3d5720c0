"""The strategy protocol: how a model lies on devices. The step does not know which strategy runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowpeak.ranks import Ranks
from lowpeak.records import Layout, Weights, WeightSlice


@dataclass(frozen=True)
class Frozen:
    """A frozen model; `ready()` is a context, entered by every rank together, in which it may be called."""

    model: nn.Module
    ready: Callable[[], AbstractContextManager[Any]]


class Strategy(Protocol):
    """One device, DDP, FSDP2 or ZeRO: each is one small class. What is written out here holds unless a strategy says otherwise.

    `cuts_parameters` is whether a rank holds a part of the policy's parameters alone, so that forwards hold collectives;
    `cuts_states` whether ranks have different parts of what is trained or of its states, so that only together they save it.
    """

    ranks: Ranks
    cuts_parameters: bool
    cuts_states: bool

    @property
    def promised_scale(self) -> float | None:
        """What `backward` multiplies a loss's gradients by, where the head may add its own to `.grad` itself; else None.

        None wherever something must see a gradient on its way: a reduction over ranks, hooks, a loss scale.
        """
        return None

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch's forward and backward: unless it is the step's `last`, ranks do not average yet."""
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the loss's gradients to the parameters', averaged over ranks after the step's `last` micro-batch."""
        ...

    def own_grad_norm(self) -> Tensor | None:
        """Return the norm of all ranks' gradients before clipping, where an engine of the strategy keeps them; else None."""
        return None

    def own_step(self) -> None:
        """Clip, update and clear the gradients where an engine of the strategy does that itself; else nothing."""
        return

    def hold(self, model: nn.Module, budget: int | None, whole_head: bool = False) -> AbstractContextManager[nn.Module]:
        """A context in which `model` runs without gradients: eval mode, no checkpointing, as many layers gathered as `budget`
        bytes allow (None: all), the head in any case with `whole_head`. Yields once, and restores everything however it is
        left. Every rank enters it; forwards in it are matched among ranks."""
        ...

    def slices(
        self, model: nn.Module, max_bytes: int, dtype: torch.dtype | None, weights: Weights = "merged"
    ) -> Iterator[WeightSlice]:
        """The parameters in flat ranges of at most `max_bytes`, cast to `dtype` (None: their own), in one order on every rank.

        `merged` is the whole model under the names of its checkpoint, a LoRA adapter added on the way; `adapter` is what
        training an adapter changes, under peft's names; `base` is what that is put on. Tied weights leave once. Every rank
        exhausts it: ranges are broadcast.
        """
        ...

    def layout(self, model: nn.Module, weights: Weights = "merged") -> Layout:
        """Return the layout of what `slices` gives, in its order; nothing travels."""
        ...

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        """Return this rank's flat ranges of the model's parameters, by name: for averages and for offloading."""
        ...

    def idle(self, model: nn.Module, optimizer: Any) -> list[Tensor]:
        """Return this rank's tensors that nothing reads between two steps: gradients and the optimizer's states."""
        ...

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
        """Write this rank's part of the trained weights and optimizer states into a (staged) folder; all ranks together.

        Nothing where rank 0 writes them as transformers does.
        """
        return

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        """Take back what `save_state` wrote, on as many ranks or on others; without an optimizer, the weights alone."""
        ...

    def prepare_frozen(self, model: nn.Module, room: int, on_host: bool) -> Frozen:
        """A model that is never trained, in eval mode, sharded like the policy where that is or where `room` bytes hold no
        replica; `on_host` keeps it in host memory, and on the device a layer at a time."""
        ...

    def average(self, reference: nn.Module, policy: nn.Module, share: float) -> None:
        """reference = share * policy + (1 - share) * reference, on this rank's shards alone."""
        ...

"""The protocols of a parallel strategy: how a model is placed on devices, seen by each kind of caller.

`Strategy` is all of them together: what a run has. A function asks for the smallest protocol that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowpeak.arguments import StorageFormat
from lowpeak.ranks import Ranks
from lowpeak.records import WeightLayout, Weights, WeightSlice


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model; all ranks enter the context `ready()` together, and may call the model inside."""

    model: nn.Module
    ready: Callable[[], AbstractContextManager[Any]]


class TrainingStrategy(Protocol):
    """A training step's gradients: backward and reduction over ranks."""

    ranks: Ranks

    @property
    def inplace_grad_scale(self) -> float | None:
        """Return the factor of `backward` on gradients, for a head that adds to `.grad` in place.

        None if a gradient must be observed on its way: by a reduction over ranks, by hooks or by a loss scaler.
        """
        return None

    def micro_batch_context(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward and backward; some strategies average gradients in the `last` one."""
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the loss's gradients to the parameters'."""
        ...

    def average_gradients(self, model: nn.Module) -> None:
        """Average gradients over ranks after the step's last backward, unless the backwards do that."""
        return

    @property
    def survives_failed_passes(self) -> bool:
        """Return whether a rank whose pass fails can join its remaining collectives, so that all ranks try again."""
        return False

    def finish_failed_pass(self, model: nn.Module, run_masked: Callable[[], object]) -> None:
        """Join the remaining collectives of a pass that has failed on this rank, or has not begun.

        `run_masked` is the same pass with a masked micro-batch. What it computes is discarded.
        """
        return


class OptimizerStrategy(Protocol):
    """The optimizer's step: DeepSpeed's, and which values a rank updates."""

    def deepspeed_grad_norm(self) -> Tensor | None:
        """Return the norm of all ranks' gradients before clipping if the strategy's engine stores them; else None."""
        return None

    def deepspeed_step(self) -> None:
        """Clip, update and clear the gradients if the strategy's engine does that itself; else do nothing."""
        return

    def place_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, storage: StorageFormat | None
    ) -> None:
        """Tell a CompactAdamW which values this rank updates, and where gradients are summed."""
        return


class InferenceStrategy(Protocol):
    """Forwards without gradients: of the policy, and of models that are never trained.

    `shards_parameters` is True if a rank stores only a shard of the policy's parameters; forwards then contain collectives.
    """

    shards_parameters: bool

    def gather_for_inference(
        self, model: nn.Module, budget: int | None, gather_head: bool = False
    ) -> AbstractContextManager[nn.Module]:
        """Return a context in which `model` runs without gradients: in eval mode, without activation checkpointing.

        As many layers are gathered as `budget` bytes allow (None: all); `gather_head` gathers the head in any case. All ranks
        enter the context, and run their forwards in lockstep. Leaving it restores everything, also after an error.
        """
        ...

    def prepare_frozen(self, model: nn.Module, free_bytes: int, on_host: bool) -> FrozenModel:
        """Place a model that is never trained on the devices, in eval mode.

        It is sharded if the policy is, or if a replica exceeds `free_bytes`. With `on_host` it is stored in host memory, and
        copied to the device one layer at a time.
        """
        ...

    def average(self, reference: nn.Module, policy: nn.Module, share: float, noise_key: str) -> None:
        """Update reference = share * policy + (1 - share) * reference, on this rank's shards.

        A bf16 reference is rounded stochastically; the `noise_key` and the parameter decide the noise, the same on all ranks.
        """
        ...


class ParameterExport(Protocol):
    """Unsharded parameters, for engines and for files."""

    def slices(
        self, model: nn.Module, max_bytes: int, dtype: torch.dtype | None, weights: Weights = "merged"
    ) -> Iterator[WeightSlice]:
        """Yield the parameters in flat slices of at most `max_bytes`, in one order on all ranks.

        Values are cast to `dtype` (None: keep each parameter's). `merged` is the whole model under its checkpoint's names,
        with a LoRA adapter added to it; `adapter` is what training an adapter changes, under peft's names; `base` is the model
        without the adapter. Tied weights are sent once. Every rank must exhaust the iterator, since slices are broadcast.
        """
        ...

    def layout(self, model: nn.Module) -> WeightLayout:
        """Return names, shapes and dtypes of the slices, in its order, without communication."""
        ...


class ShardedState(Protocol):
    """Trained weights and optimizer states of this rank, in memory and in checkpoints.

    `shards_states` is True if ranks store different parts of the trained weights or of their states, so that all ranks write.
    """

    shards_states: bool

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        """Return this rank's flat shards of the model's parameters, by name."""
        ...

    def offloadable_tensors(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return this rank's tensors that nothing reads between two steps: gradients and optimizer states."""
        ...

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write this rank's part of the trained weights and optimizer states into a staged folder.

        All ranks call it together.
        """
        ...

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        """Read the files of `save_state`, on any number of ranks; without an optimizer, the weights alone."""
        ...


class Strategy(TrainingStrategy, OptimizerStrategy, InferenceStrategy, ParameterExport, ShardedState, Protocol):
    """A parallel strategy of a run: one device, DDP, FSDP2, ZeRO or tensor parallelism."""

    def preparing(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context in which `accelerator.prepare` places the policy on the devices."""
        return nullcontext()

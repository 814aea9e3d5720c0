"""What all strategies have in common: a parameter is whole on this rank, or a flat range of it is (`_shard` says which)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, cpu_offload
from torch import Tensor, nn

from lowpeak.ranks import Ranks
from lowpeak.records import Weights, WeightSlice
from lowpeak.strategies.flat import FlatShard, ranges
from lowpeak.strategies.frozen import average, freeze, frozen_bytes, replicate, shard_rows, shards_of
from lowpeak.strategies.gathered import Gatherer
from lowpeak.strategies.outgoing import layout, outgoing
from lowpeak.strategies.rows import rows_shard
from lowpeak.strategies.shards import load_torch_state
from lowpeak.strategies.states import torch_idle
from lowpeak.strategies.strategy import Frozen


def num_peers(accelerator: Accelerator) -> int:
    """How many processes hold parts of one model's tensors and are one rank, by accelerate's parallelism config."""
    return int(getattr(accelerator.parallelism_config, "tp_size", None) or 1)


class Accelerated:
    """A strategy over what accelerate prepared. Strategies say how gradients meet, and how parameters are cut."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        # The one CPU has several names, and a tensor that moves from "cpu" to "cpu:0" is copied.
        self._device = torch.device("cpu") if accelerator.device.type == "cpu" else accelerator.device
        self._ranks = Ranks(self._device, num_peers(accelerator))
        self._gatherer = Gatherer(self._ranks, self._device)

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        return self._ranks

    @property
    def promised_scale(self) -> float | None:
        """None: gradients are reduced over ranks on their way."""
        return None

    @property
    def cuts_parameters(self) -> bool:
        """Whether a rank holds a part of the policy's parameters alone."""
        return False

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch's forward and backward: nothing."""
        return nullcontext()

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
        """The unwrapped model ready to run without gradients; what is cut is gathered within `budget`, see `Gatherer`."""
        inner = self._accelerator.unwrap_model(model)
        with self._gatherer.gathered(inner, self._shard, budget, whole_head):
            yield inner

    def slices(
        self, model: nn.Module, max_bytes: int, dtype: torch.dtype | None, weights: Weights = "merged"
    ) -> Iterator[WeightSlice]:
        """The parameters in flat ranges of at most `max_bytes`, cast to `dtype`; tied weights once; see `ranges`."""
        return ranges(outgoing(self._accelerator.unwrap_model(model), self._shard, weights), max_bytes, dtype)

    def layout(self, model: nn.Module, weights: Weights = "merged") -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, whole shapes and dtypes of what `slices` gives."""
        return layout(self._accelerator.unwrap_model(model), self._shard, weights)

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's flat range of each parameter, all of it where it is not cut."""
        return {name: shard.local for name, shard in self._shards(model).items()}

    def idle(self, model: nn.Module, optimizer: Any) -> list[Tensor]:
        """Gradients and states where the parameters' own optimizer has them; none before it was made."""
        return [] if optimizer is None else torch_idle(optimizer)

    @property
    def cuts_states(self) -> bool:
        """No: rank 0 has all that a checkpoint needs."""
        return False

    def save_state(self, checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
        """Nothing: rank 0 writes weights and optimizer states as transformers does."""

    def load_state(self, checkpoint: Path, model: nn.Module, optimizer: Any | None) -> None:
        """Weights and optimizer states from what several ranks wrote, each rank its own."""
        load_torch_state(checkpoint, self._accelerator.unwrap_model(model), optimizer, self._ranks.processes)

    def prepare_frozen(self, model: nn.Module, room: int, on_host: bool) -> Frozen:
        """A replica on the device; among several ranks it is cut between rows where one of them has no `room` for it.

        A quantised model stays where it was put.
        """
        model = freeze(model)
        if not getattr(model, "is_quantized", False):
            lacking = self._ranks.max([float(frozen_bytes(model) > room)])[0]
            first_alone = self._first_alone_read(model)
            if self._ranks.world_size > 1 and (on_host or lacking):
                shard_rows(model, None, on_host, self._device if first_alone else None)
            elif on_host:
                cpu_offload(model, self._device)
            elif first_alone:
                replicate(model, self._device)
            else:
                model.to(self._device)
        return Frozen(model, lambda: self._ready(model))

    def _first_alone_read(self, model: nn.Module) -> bool:
        """Whether rank 0 has to hand a frozen model's weights out; what lacks them then has the dtypes that rank 0 found."""
        if not self._ranks.max([float(any(p.is_meta for p in model.parameters()))])[0]:
            return False
        dtypes = self._ranks.processes.first(lambda: {name: p.dtype for name, p in model.named_parameters()})
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                parameter.data = parameter.data.to(dtypes[name])
        return True

    def average(self, reference: nn.Module, policy: nn.Module, share: float) -> None:
        """reference = share * policy + (1 - share) * reference, on this rank's ranges alone."""
        average(self._shards(reference), self._shards(policy), share)

    @contextmanager
    def _ready(self, frozen: nn.Module) -> Iterator[nn.Module]:
        """A frozen model that may be called, computing as the policy does, so that log-probs round alike."""
        with self._accelerator.autocast(), self.hold(frozen, 0, whole_head=True) as model:
            yield model

    def _shards(self, model: nn.Module) -> dict[str, FlatShard]:
        return shards_of(self._accelerator.unwrap_model(model), self._shard)

    def _shard(self, parameter: nn.Parameter) -> FlatShard | None:
        """This rank's range of a parameter, None for one that is whole: here those of frozen models that `fully_shard` cut."""
        return rows_shard(parameter, None, self._device)

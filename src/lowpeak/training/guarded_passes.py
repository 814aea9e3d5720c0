"""Passes of a rank that may run out of memory while the other ranks wait in the same pass's collectives."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from lowpeak.errors import MemoryExhaustedError, RankError, first_line
from lowpeak.memory import has_device_memory, is_out_of_memory
from lowpeak.parallel import TrainingStrategy
from lowpeak.records import MicroBatch

Result = TypeVar("Result")


class GuardedPasses:
    """Runs passes until one runs out of memory; after that this rank only takes part in the others' collectives.

    `batches` are this rank's micro-batches, `masked` is the one that takes the place of each after a failure, and `failed` is
    the one that ran out of memory. `on_fatal_error` is called for an error that will end the run on all ranks. Run all passes
    inside `agreement`.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: TrainingStrategy,
        device: torch.device,
        batches: Sequence[MicroBatch],
        masked: MicroBatch,
        on_fatal_error: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self._model, self._strategy, self._device, self._on_fatal_error = model, strategy, device, on_fatal_error
        self.batches, self.masked = batches, masked
        self.failed: MicroBatch | None = None
        self._error: MemoryExhaustedError | None = None

    def run(self, run_pass: Callable[[MicroBatch], Result], batch: MicroBatch) -> Result | None:
        """Return `run_pass(batch)`; None after a failure, when the pass runs on the masked micro-batch.

        An error that is not of memory, or one under a strategy that cannot go on after it, is raised.
        """
        if self._error is None:
            try:
                return run_pass(batch)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if not self._strategy.survives_failed_passes:
                    self._on_fatal_error(first_line(error))
                    raise
                self._error, self.failed = MemoryExhaustedError(first_line(error)), batch
                self._error.reason, self._error.is_awaited = first_line(error), True
            # Outside of the except block: until it ends, the error's traceback keeps the tensors of the failed pass.
            free_unused(self._device)
        try:
            self._strategy.finish_failed_pass(self._model, lambda: run_pass(self.masked))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RankError(
                f"this rank ran out of memory ({self._error}), and again when it took part in the other ranks' pass with a "
                f"micro-batch of two tokens ({first_line(error)}), so no smaller size would help: shard over more ranks, or store "
                "fewer bytes per parameter."
            ) from error
        return None

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Raise an error of the block, or MemoryExhaustedError for a failed pass, on all ranks; all ranks must enter it."""
        try:
            with self._strategy.ranks.propagate_errors():
                yield
                if self._error is not None:
                    raise self._error
        except MemoryExhaustedError as error:
            error.on_all_ranks = True
            raise


def run_guarded(
    guard: GuardedPasses | None, run_pass: Callable[..., Result], batches: Sequence[MicroBatch], *more: Sequence[object]
) -> list[Result]:
    """Return the results of a pass on each micro-batch; `more` are arguments before it. With a guard errors are agreed on."""
    results = []
    with nullcontext() if guard is None else guard.agreement():
        for batch, *others in zip(batches, *more, strict=True):
            run = partial(run_pass, *others)
            result = run(batch) if guard is None else guard.run(run, batch)
            if result is not None:
                results.append(result)
    return results


def free_unused(device: torch.device) -> None:
    """Free tensors in reference cycles, and return cached memory of torch's allocator."""
    gc.collect()
    if has_device_memory(device):
        torch.get_device_module(device).empty_cache()

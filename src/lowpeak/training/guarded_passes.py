"""Passes that may run out of memory on a rank while others wait in its collectives."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from lowpeak.errors import LocalMemoryError, RankError, first_line
from lowpeak.memory import is_out_of_memory, return_cached_memory
from lowpeak.parallel import TrainingStrategy
from lowpeak.records import MicroBatch

Result = TypeVar("Result")


class GuardedPasses:
    """Runs passes until one runs out of memory; after that this rank only takes part in the others' collectives.

        with guard.agreement():                     # as `run_guarded` does
            for batch in batches:
                result = guard.run(run_pass, batch)

    batches             this rank's micro-batches in the present passes
    failed              the micro-batch that ran out of memory
    masked              the micro-batch that replaces each one after a failure
    on_fatal_error      is called with `batches` and the reason if the failure will end the run on all ranks
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: TrainingStrategy,
        device: torch.device,
        masked: MicroBatch,
        on_fatal_error: Callable[[Sequence[MicroBatch], str], object] = lambda batches, reason: None,
    ) -> None:
        self._model, self._strategy, self._device = model, strategy, device
        self._masked, self._on_fatal_error = masked, on_fatal_error
        self.batches: Sequence[MicroBatch] = ()
        self.failed: MicroBatch | None = None
        # Of the failure. The error itself would keep the tensors of its frames.
        self._reason = ""

    def run(self, run_pass: Callable[[MicroBatch], Result], batch: MicroBatch) -> Result | None:
        """Return `run_pass(batch)`; None after a failure, when the pass runs on the masked micro-batch.

        An error that is not of memory, or one under a strategy that cannot go on after it, is raised.
        """
        if self.failed is None:
            try:
                return run_pass(batch)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if not self._strategy.survives_failed_passes:
                    self._on_fatal_error(self.batches, first_line(error))
                    raise
                self._reason, self.failed = first_line(error), batch
            # Outside of the except block: until it ends, the error's traceback keeps the tensors of the failed pass.
            free_unused(self._device)
        try:
            self._strategy.finish_failed_pass(self._model, lambda: run_pass(self._masked))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RankError(
                f"this rank ran out of memory ({self._reason}), and again when it took part in the other ranks' pass with a "
                f"micro-batch of two tokens ({first_line(error)}), so no smaller size would help: shard over more ranks, or store "
                "fewer bytes per parameter."
            ) from error
        return None

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Raise an error of the block, or AgreedMemoryError for a failed pass, on all ranks; all ranks must enter it."""
        with self._strategy.ranks.propagate_errors():
            yield
            if self.failed is not None:
                raise LocalMemoryError(self._reason)


def run_guarded(
    guard: GuardedPasses | None, run_pass: Callable[..., Result], batches: Sequence[MicroBatch], *more: Sequence[object]
) -> list[Result]:
    """Return the results of a pass on each micro-batch; `more` are arguments before it. With a guard errors are agreed on."""
    results = []
    if guard is not None:
        guard.batches = batches
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
    return_cached_memory(device)

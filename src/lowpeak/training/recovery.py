"""Recovery from out-of-memory errors: all ranks lower the run's sizes, and the failed phase runs again from its start.

    for attempt in attempts(context, Phase.TRAIN):
        if attempt.is_retry:
            step = repack_step(step)                                # within the lower sizes
        with attempt:
            loss = run_step(step.micro_batches, attempt.guard())    # ends in an agreement of all ranks

The groups, the weights of the loss and the random numbers stay, so the result is that of a run with the smaller sizes. The new
sizes stay for the run, are journaled with the reason, and are in its checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from lowpeak.arguments import ColocateSettings, ServerSettings
from lowpeak.batching import masked_batch
from lowpeak.errors import AgreedMemoryError, MemoryExhaustedError
from lowpeak.memory import ActivationOffload, AsyncHostMover, Phase, free_bytes, has_device_memory
from lowpeak.optim import gradient_of
from lowpeak.parallel import discard_gradients
from lowpeak.ranks import Ranks
from lowpeak.records import MicroBatch, Unit
from lowpeak.sizes import Sizes
from lowpeak.training.guarded_passes import GuardedPasses, free_unused
from lowpeak.training.recorded_sizes import record_sizes, take_sizes
from lowpeak.training.run import Run, RunContext

logger = logging.getLogger(__name__)

LEAST_CHUNK = 16  # tokens whose logits are in memory together: below it a pass takes longer and saves hardly any memory
LEAST_CACHE = 1 << 24  # bytes of a KV cache for sequences of unknown length
LEAST_BUFFER = 1 << 20  # bytes of a bucket of weights, and of gathered layers
_PASSES = (Phase.SCORE, Phase.TRAIN)
_FILL_CACHE = (Phase.ROLLOUT, Phase.EVALUATE)


@dataclass(frozen=True)
class Demand:
    """The largest sizes that a failed phase had in memory at once; each field is a maximum over ranks.

    batch_tokens, batch_units       of its largest micro-batch; a unit (a sequence or a pair) is never split
    cache_bytes, sequence_bytes     of the KV cache that all its sequences would fill, and of one sequence
    """

    batch_tokens: int = 0
    batch_units: int = 0
    cache_bytes: int = 0
    sequence_bytes: int = 0

    @classmethod
    def of_batches(cls, batches: Sequence[MicroBatch], unit: Unit = "token") -> Demand:
        """Return the demand of the largest micro-batch."""
        num_sequences = max((batch.tokens.num_sequences for batch in batches), default=0)
        num_tokens = max((batch.input_ids_BL.numel() for batch in batches), default=0)
        return cls(num_tokens, num_sequences // 2 if unit == "pair" else num_sequences)

    @classmethod
    def of_vllm(
        cls, where: ColocateSettings | ServerSettings, num_parameters: int, device_bytes: int, sequence_bytes: int
    ) -> Demand:
        """Return the demand of a colocated vLLM on a device of `device_bytes` (0: unknown), which allocates all of its KV cache.

        Its share of the device has bf16 weights and the cache; activations and graphs are left out.
        """
        cache_bytes = 0
        if isinstance(where, ColocateSettings) and device_bytes:
            share = int(where.gpu_memory_utilization * device_bytes)
            cache_bytes = where.kv_cache_bytes or max(0, share - 2 * num_parameters // where.tensor_parallel_size)
        return cls(cache_bytes=cache_bytes, sequence_bytes=sequence_bytes)

    @classmethod
    def of_passes(cls, guard: GuardedPasses, ranks: Ranks, unit: Unit) -> Demand:
        """Return the demand of this rank's failed micro-batch, or of its largest if no rank recorded one; a collective."""
        if not ranks.max([float(guard.failed is not None)])[0]:
            return cls.of_batches(guard.batches, unit)
        return cls() if guard.failed is None else cls.of_batches([guard.failed], unit)


class Attempt:
    """One try at a phase: a `with` block that ends quietly if memory ran out and all ranks have agreed on it.

    Other errors leave the block. `is_retry` is false in the first attempt alone; `demand` describes what the block has in
    memory. `failure` has the reason and what was in memory, never the error, whose frames keep tensors.
    """

    def __init__(self, context: RunContext, phase: Phase, is_retry: bool, demand: Callable[[], Demand]) -> None:
        self._context, self._phase, self.is_retry, self.demand = context, phase, is_retry, demand
        self.failure: tuple[str, str] | None = None

    def guard(self, unit: Unit = "token") -> GuardedPasses:
        """Return a guard of the block's passes, whose micro-batches are its demand; they never split a `unit`."""
        guard = guard_passes(self._context, self._phase, unit)
        self.demand = partial(Demand.of_passes, guard, self._context.run.strategy.ranks, unit)
        return guard

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        strategy = self._context.run.strategy
        # A single process has nobody to agree with.
        agreed = MemoryExhaustedError if strategy.ranks.processes.world_size == 1 else AgreedMemoryError
        if not isinstance(error, agreed) or error.is_resumable:  # resumable: a phase in the block has no smaller sizes
            return False
        if self._phase in _PASSES and not strategy.survives_failed_passes:
            return False
        where = "" if error.rank is None else f"rank {error.rank}: "
        self.failure = where + error.reason, _describe_memory(self._context)
        return True


def attempts(context: RunContext, phase: Phase, demand: Callable[[], Demand] = Demand) -> Iterator[Attempt]:
    """Yield attempts at a phase until one succeeds; after a failed one, all ranks lower the run's sizes.

    `demand` describes what a failed attempt had in memory. Raise MemoryExhaustedError if the smallest sizes do not suffice.
    """
    for number in count():
        attempt = Attempt(context, phase, number > 0, demand)
        yield attempt
        if attempt.failure is None:
            return
        discard_gradients(context.model_wrapped.parameters())
        free_unused(context.accelerator.device)
        lower_run_sizes(context, phase, *attempt.failure, attempt.demand())


def lower_run_sizes(context: RunContext, phase: Phase, reason: str, memory_in_use: str, demand: Demand) -> None:
    """Replace the run by one with the next smaller sizes for `phase`; log and journal the change, on all ranks alike."""
    run, ranks = context.run, context.run.strategy.ranks
    most = Demand(*(int(number) for number in ranks.max([float(number) for number in vars(demand).values()])))
    sizes = smaller_sizes(run.sizes, phase, most, offloads=_can_offload(context))
    if sizes is None:
        raise MemoryExhaustedError(
            f"out of memory in phase {phase}, also with the smallest sizes ({_describe(run.sizes)}): {reason.rstrip('.')}. "
            f"Device memory held {memory_in_use}. Shard over more ranks, store fewer bytes per parameter (dtype='bfloat16', "
            "offload_optimizer), train an adapter, or shorten the sequences.",
            is_resumable=True,
        )
    changed = {name: value for name, value in sizes.as_dict().items() if value != run.sizes.as_dict().get(name)}
    changed.pop("lowered", None)
    context.run = run_with_sizes(context, sizes)
    words = ", ".join(f"{name} {getattr(run.sizes, name)} -> {value}" for name, value in changed.items())
    logger.warning(
        "Out of memory in phase %s: the phase runs again with %s, and the run keeps that. (%s)", phase, words, reason
    )
    if context.is_in_train:  # an evaluation by itself would begin a new journal
        run.journal.write_event(context.state.global_step, "out of memory", phase=phase.value, reason=reason, **changed)


def guard_passes(context: RunContext, phase: Phase, unit: Unit) -> GuardedPasses:
    """Return a guard of the policy's passes.

    Where a failed pass ends the run (`survives_failed_passes` is False), the next smaller sizes are recorded in the output folder
    first, for the ranks that a launcher or the user starts again.
    """
    run, device = context.run, context.accelerator.device
    record = partial(_record_smaller_sizes, context, phase, unit)
    return GuardedPasses(context.model_wrapped, run.strategy, device, masked_batch(run.budget), record)


def _record_smaller_sizes(
    context: RunContext, phase: Phase, unit: Unit, batches: Sequence[MicroBatch], reason: str
) -> None:
    demand = Demand.of_batches(batches, unit)
    sizes = smaller_sizes(context.run.sizes, phase, demand, offloads=_can_offload(context))
    if sizes is None:
        return
    values = {name: getattr(sizes, name) for name in sizes.lowered}
    record_sizes(Path(context.args.output_dir), phase.value, reason, values, context.args.process_index)
    logger.warning(
        "Out of memory in phase %s: %s cannot recover from a failed pass, so the run ends. Resumed or restarted, it continues with "
        "%s.",
        *(phase, type(context.run.strategy).__name__, ", ".join(f"{name} {value}" for name, value in values.items())),
    )


def apply_recorded_sizes(context: RunContext, *, is_new: bool) -> None:
    """Lower the sizes of a run that is resumed or restarted to those that were recorded when it ended; all ranks call it.

    A new run forgets those of an earlier one in its folder.
    """
    run, folder = context.run, Path(context.args.output_dir)
    record: dict[str, Any] = run.strategy.ranks.processes.call_on_first(lambda: take_sizes(folder))
    if not record or is_new:
        return
    sizes = {
        name: value for name, value in record["sizes"].items() if value is True or value < getattr(run.sizes, name)
    }
    context.run = run_with_sizes(context, run.sizes.lower(**sizes))
    run.journal.write_event(
        context.state.global_step, "out of memory", phase=record["phase"], reason=record["reason"], **sizes
    )


def smaller_sizes(sizes: Sizes, phase: Phase, demand: Demand, *, offloads: bool = False) -> Sizes | None:
    """Return the sizes for another attempt at `phase`; None if the phase has no smaller size.

    Passes split micro-batches in halves until each has one sequence, then chunks of log-probs; then training moves saved
    activations to the host (`offloads`: if it can and does not yet). Engines halve the KV cache down to one sequence, then a
    planned gather budget; a sync of weights halves its buckets.
    """
    if phase in _PASSES:
        return _smaller_passes(sizes, demand, offloads and phase is Phase.TRAIN)
    if phase in _FILL_CACHE:
        return _smaller_generation(sizes, demand)
    sync_bytes = sizes.sync_bytes // 2
    return None if phase is not Phase.SYNC or sync_bytes < LEAST_BUFFER else sizes.lower(sync_bytes=sync_bytes)


def _smaller_passes(sizes: Sizes, demand: Demand, offloads: bool) -> Sizes | None:
    tokens = _half(min(sizes.micro_batch_tokens, demand.batch_tokens))
    if demand.batch_units > 1 and tokens < sizes.micro_batch_tokens:
        return sizes.lower(micro_batch_tokens=tokens)
    if sizes.logprob_chunk_size > LEAST_CHUNK:
        return sizes.lower(logprob_chunk_size=max(LEAST_CHUNK, _half(sizes.logprob_chunk_size)))
    return sizes.lower(activation_offloading=True) if offloads and not sizes.activation_offloading else None


def _smaller_generation(sizes: Sizes, demand: Demand) -> Sizes | None:
    used = min(sizes.kv_cache_bytes, demand.cache_bytes or sizes.kv_cache_bytes)
    cache = max(_half(used), demand.sequence_bytes or LEAST_CACHE)
    if cache < used:
        return sizes.lower(kv_cache_bytes=cache)
    if not sizes.gather_budget:  # a budget that no plan has set follows from free memory
        return None
    return sizes.lower(gather_budget=sizes.gather_budget // 2 if sizes.gather_budget > LEAST_BUFFER else 0)


def _half(value: int) -> int:
    """Return the power of two that is at most half of `value`, and above a quarter of it."""
    return 1 << max(0, (value // 2).bit_length() - 1)


def _can_offload(context: RunContext) -> bool:
    is_kept = context.run.logprob_settings.activation_context is nullcontext
    return is_kept and has_device_memory(context.accelerator.device)


def run_with_sizes(context: RunContext, sizes: Sizes) -> Run:
    """Return the run with other sizes, and with the offload of activations that they may have."""
    run = context.run.with_sizes(sizes)
    if not sizes.activation_offloading or run.logprob_settings.activation_context is not nullcontext:
        return run
    offload = ActivationOffload(context.model_wrapped, AsyncHostMover(context.accelerator.device))
    return replace(run, logprob_settings=replace(run.logprob_settings, activation_context=offload.saving))


def _describe(sizes: Sizes) -> str:
    not_sizes = ("layout", "lowered", "memory_budget")
    return ", ".join(f"{name} {value}" for name, value in sizes.as_dict().items() if name not in not_sizes)


def _describe_memory(context: RunContext) -> str:
    """Return the bytes of weights, gradients, optimizer states and free memory on this rank's device."""
    device, strategy, model = context.accelerator.device, context.run.strategy, context.model_wrapped
    kinds = {
        "weights": strategy.shards(model).values(),
        "gradients": [each for parameter in model.parameters() if (each := gradient_of(parameter)) is not None],
        "optimizer states": strategy.offloadable_tensors(model, context.optimizer),
    }
    sizes = {name: sum(t.nbytes for t in tensors if t.device.type == device.type) for name, tensors in kinds.items()}
    shown = ", ".join(f"{name} {value / 2**30:.2f} GiB" for name, value in sizes.items())
    return f"{shown}, and {free_bytes(device) / 2**30:.2f} GiB were free"

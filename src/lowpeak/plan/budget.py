"""The sizes with which a run stays within a memory budget: the largest ones that a plan of the whole run allows.

Two plans, with the least and with the most sizes, bound the choice. Between them bytes are interpolated: activations by the
tokens of the largest micro-batch, bytes inside the head by the tokens of a chunk, those of a rollout by its KV cache. A plan of
the chosen sizes then confirms them, or the phase that exceeds the limit gets smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lowpeak.arguments import show_bytes
from lowpeak.device_kind import rehearse_device
from lowpeak.errors import ArgumentError
from lowpeak.memory import Kind, PhaseMemory
from lowpeak.plan.advice import advise
from lowpeak.plan.candidate import CACHE, GATHER
from lowpeak.plan.computed import casts_weights, margin
from lowpeak.plan.derived_configs import with_arguments
from lowpeak.plan.inputs import RunInputs
from lowpeak.plan.plan import Plan, make_plan
from lowpeak.plan.planned_batches import longest_record
from lowpeak.plan.request import PlanRequest

TOKENS, CHUNK, BUCKET = "micro_batch_tokens", "logprob_chunk_size", "vllm_bucket_size"
_LEAST_BUCKET = 1 << 20
_LEAST_CHUNK, _MOST_CHUNK = 16, 1024
# A head's products lose speed below this many tokens, so that micro-batches do not grow at their cost.
_GOOD_CHUNK = 256
_MOST_TRIALS = 4  # plans of choices, before the least sizes are taken
_WIDEST = 4  # bytes of a gathered parameter

Sizes = dict[str, int]


@dataclass(frozen=True)
class BudgetFit:
    """Chosen sizes, their plan, and the problem with a remedy if the plan exceeds the budget."""

    sizes: Mapping[str, int]
    plan: Plan
    problem: str = ""


def fit_sizes(
    request: PlanRequest, budget: int, unplanned_bytes: int = 0, report: Callable[[str], object] = lambda text: None
) -> BudgetFit:
    """Return the largest sizes with which every phase of the run's plan takes at most `budget` bytes of a device.

    First the tokens of a micro-batch, then those of a log-prob chunk, buckets of weights for vLLM, the KV cache and the gather
    budget. Sizes that the arguments set stay as they are. `unplanned_bytes` are bytes of a process that the plan does not count.
    """
    return _SizeSearch(request, budget, unplanned_bytes, report).run()


def budget_of(request: PlanRequest) -> int | None:
    """Return the bytes of a planned run's memory_budget on the machine; None without one."""
    with rehearse_device(request.machine.device):
        budget = RunInputs(request).settings.memory.memory_budget
    memory = request.machine.memory
    if budget is None or budget == "auto":
        return None if budget is None else memory
    number = int(budget * memory if budget <= 1 else budget)
    if number > memory:
        raise ArgumentError(
            f"memory_budget={budget} is {show_bytes(number)}, and a device has {show_bytes(memory)}: "
            "lower it, or set memory_budget='auto'."
        )
    return number


class _SizeSearch:
    def __init__(
        self, request: PlanRequest, budget: int, unplanned_bytes: int, report: Callable[[str], object]
    ) -> None:
        self._request, self._report = request, report
        self._budget, self._unplanned_bytes, self._limit = budget, unplanned_bytes, budget - unplanned_bytes
        with rehearse_device(request.machine.device):
            self._inputs = RunInputs(request)
        self._values = {name: values for name, values in self._possible() if self._set_value(name) is None}

    def run(self) -> BudgetFit:
        least = {name: values[0] for name, values in self._values.items()}
        smallest = self._plan(least)
        if smallest.peak > self._limit:
            return BudgetFit(least, smallest, self._problem(smallest, least))
        if GATHER in self._values:
            self._values[GATHER].append(_WIDEST * smallest.counts.total)
        most = {name: values[-1] for name, values in self._values.items()}
        largest = self._plan(most) if most != least else smallest
        if largest.peak <= self._limit:
            return BudgetFit(most, largest)
        sizes: Sizes | None = self._choose(_Between(smallest, largest, self._largest_batch))
        for _ in range(_MOST_TRIALS):
            if sizes in (None, least):
                break
            plan = self._plan(sizes)
            if plan.peak <= self._limit:
                return BudgetFit(sizes, plan)
            sizes = self._lowered(sizes, plan)
        return BudgetFit(least, smallest)

    # sizes

    def _possible(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the sizes that act in the run, with their possible values, the least first."""
        inputs = self._inputs
        yield TOKENS, inputs.token_sizes
        if self._request.kind != "reward":
            yield CHUNK, _powers(_LEAST_CHUNK, _MOST_CHUNK)
        if inputs.is_online and inputs.settings.vllm is not None:
            yield BUCKET, _powers(_LEAST_BUCKET, int(inputs.settings.vllm.bucket_bytes))
        if inputs.rollout(0) is None:
            return
        least = inputs.least_cache_bytes
        yield CACHE, _powers(least, inputs.sequences_of_rank * least)
        if self._request.sharding.sends_weights(self._request.world_size) or casts_weights(inputs):
            yield GATHER, [0]

    def _largest_batch(self, tokens: int) -> int:
        """Return the most tokens of a micro-batch with this size: those of a step are even, up to one sequence."""
        batches = [batch.input_ids_BL.numel() for batch in self._inputs.step_batches(tokens)]
        return min(tokens, max(batches, default=0) + longest_record(self._inputs), sum(batches))

    def _set_value(self, name: str) -> int | None:
        if name == BUCKET:  # which has a default
            return int(self._inputs.settings.vllm.bucket_bytes) if name in self._request.args.given else None
        value: int | None = getattr(self._inputs.settings.memory, name)
        return value

    def _plan(self, sizes: Sizes) -> Plan:
        shown = ", ".join(f"{name} {value:,}" for name, value in sizes.items())
        self._report(f"rehearsing {shown}")
        return make_plan(replace(self._request, args=with_arguments(self._request.args, sizes)))

    def _choose(self, between: _Between) -> Sizes:
        """Return the largest sizes with which no phase is expected to exceed the limit."""
        sizes = {name: values[0] for name, values in self._values.items()}
        good = {CHUNK: _GOOD_CHUNK} if CHUNK in sizes else {}
        if between.peak({**sizes, **good}) <= self._limit:
            sizes |= good
        for name in (TOKENS, CHUNK, BUCKET):
            self._raise(sizes, name, lambda larger: between.peak(larger) <= self._limit)
        # The cache leaves half of what is free to gathered layers, or to copies of fp32 weights.
        free = self._limit - between.rollout(sizes)
        share = 2 if GATHER in self._values else 1
        self._raise(sizes, CACHE, lambda larger: between.rollout(larger) <= self._limit - free + free // share)
        if GATHER in self._values:
            sizes[GATHER] = between.left_in_rollout(sizes, self._limit)
        return sizes

    def _raise(self, sizes: Sizes, name: str, fits: Callable[[Sizes], bool]) -> None:
        """Set a size to the largest of its values that fits, in place."""
        for value in self._values.get(name, ()):
            if value > sizes[name] and fits({**sizes, name: value}):
                sizes[name] = value

    def _lowered(self, sizes: Sizes, plan: Plan) -> Sizes | None:
        """Return smaller sizes for the phase that exceeds the limit; None if they are the least already."""
        for name in {"rollout": (GATHER, CACHE), "sync": (BUCKET,)}.get(plan.peak_phase, (TOKENS, CHUNK)):
            if name in sizes and sizes[name] > self._values[name][0]:
                lower = sizes[name] - (plan.peak - self._limit) if name == GATHER else sizes[name] // 2
                return {**sizes, name: max(self._values[name][0], lower)}
        return None

    # what does not fit

    def _problem(self, plan: Plan, least: Sizes) -> str:
        """Return the sentence for a run whose least sizes exceed the budget."""
        shown = ", ".join(f"{name}={value}" for name, value in least.items()) or "the sizes that are set"
        words = f"phase {plan.peak_phase} takes {self._shown(plan.peak)} with the smallest sizes ({shown})"
        return f"{words}, and memory_budget is {show_bytes(self._budget)}: {self._remedy(plan, least)}."

    def _remedy(self, plan: Plan, least: Sizes) -> str:
        lower = self._smaller_explicit(plan)
        if lower:
            small = self._plan({**least, **lower})
            if small.peak <= self._limit:
                now = ", ".join(f"{name} (now {self._set_value(name)})" for name in lower)
                then = ", ".join(f"{name}={value}" for name, value in lower.items())
                return f"lower {now}, or remove it; with {then} the run takes {self._shown(small.peak)}"
            plan = small
        first = "".join(f"lower {name} to {value}; then " for name, value in lower.items())
        changes = [each for each in advise(plan, count=None) if each.setting.split("=")[0] not in self._values]
        fitting = [each for each in changes if each.peak <= self._limit]
        if fitting:
            best = min(fitting, key=lambda each: each.added_seconds)
            return f"{first}the smallest change is {best.setting}, with which it takes about {self._shown(best.peak)}"
        if changes:
            best = changes[0]
            peak = f"with which it takes about {self._shown(best.peak)}"
            return f"{first}no single change is enough; {best.setting} helps most, {peak}; raise memory_budget, too"
        return f"{first}raise memory_budget, or train a smaller model"

    def _smaller_explicit(self, plan: Plan) -> Sizes:
        """Return the least values of explicit sizes that act in the phases beyond the limit."""
        beyond = {name for name, phase in plan.phases.items() if phase.peak > self._limit}
        acting = {TOKENS, CHUNK} if beyond & {"score", "forward", "backward"} else set()
        acting |= {CACHE, GATHER} if "rollout" in beyond else set()
        acting |= {BUCKET} if "sync" in beyond else set()
        smaller = {}
        for name, values in self._possible():
            value = self._set_value(name)
            if name in acting and value is not None and value > values[0]:
                smaller[name] = values[0]
        return smaller

    def _shown(self, tensors: int) -> str:
        return show_bytes(tensors + self._unplanned_bytes)


class _Between:
    """Peaks with sizes between those of two plans, by interpolation."""

    def __init__(self, least: Plan, most: Plan, largest_batch: Callable[[int], int]) -> None:
        self._least, self._most, self._largest_batch = least, most, cache(largest_batch)
        self._machine = least.request.machine

    def peak(self, sizes: Sizes) -> int:
        return max(self._phase(name, sizes) for name in self._least.phases)

    def rollout(self, sizes: Sizes) -> int:
        """Return the bytes of the rollout, 0 without one."""
        return self._phase("rollout", sizes) if "rollout" in self._least.phases else 0

    def left_in_rollout(self, sizes: Sizes, limit: int) -> int:
        """Return the bytes that gathered or copied weights may take in a rollout: all of the model at most."""
        whole = _WIDEST * self._least.counts.total
        tensors = self._tensors("rollout", sizes)
        left = limit - tensors - margin(self._machine, tensors)
        per_byte = (margin(self._machine, 2 * whole) - margin(self._machine, whole)) / whole + 1
        return min(whole, max(0, int(left / per_byte)))

    def _phase(self, name: str, sizes: Sizes) -> int:
        tensors = self._tensors(name, sizes)
        return tensors + margin(self._machine, tensors)

    def _tensors(self, name: str, sizes: Sizes) -> int:
        least, most = self._least.phases[name], self._most.phases[name]
        by_kind: dict[Kind, str] = {Kind.KV_CACHE: CACHE, Kind.LOGITS: CHUNK, Kind.ACTIVATIONS: TOKENS}
        gathered = least.device.get(Kind.GATHERED, 0)
        if name == "rollout":
            by_kind = dict.fromkeys(by_kind, CACHE)
            gathered += sizes.get(GATHER, 0)
            if self._least.sizes[CACHE] == self._most.sizes[CACHE]:
                least = most  # one plan only: summing kinds of two peaks overestimates both
        kinds = (least.device.keys() | most.device.keys()) - {Kind.MARGIN, Kind.GATHERED}
        buckets = 0
        if name == "sync" and BUCKET in sizes:  # one is filled while another is sent
            kinds.discard(Kind.BUCKETS)
            vllm: Any = self._least.inputs.settings.vllm
            buckets = least.device.get(Kind.BUCKETS, 0) + 2 * (sizes[BUCKET] - int(vllm.bucket_bytes))
        return gathered + buckets + sum(self._bytes(kind, least, most, by_kind.get(kind), sizes) for kind in kinds)

    def _bytes(self, kind: Kind, least: PhaseMemory, most: PhaseMemory, size: str | None, sizes: Sizes) -> int:
        low, high = least.device.get(kind, 0), most.device.get(kind, 0)
        if size is None:
            return max(low, high)
        first, last = (plan.tokens if size == TOKENS else plan.sizes[size] for plan in (self._least, self._most))
        if last == first:
            return max(low, high)
        value = int(sizes.get(size, self._least.sizes[size]))
        amount = self._largest_batch(value) if size == TOKENS else value
        return int(low + (amount - first) / (last - first) * (high - low))


def _powers(least: int, most: int) -> list[int]:
    """Return the powers of two from the first of at least `least` to the first of at least `most`."""
    first, last = ((max(1, number) - 1).bit_length() for number in (least, most))
    return [1 << power for power in range(first, max(first, last) + 1)]

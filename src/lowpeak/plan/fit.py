"""A search for the fastest settings with which a run fits: quick plans rank the candidates, the best are rehearsed."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from lowpeak.arguments import ModelParallel, StorageFormat, show_bytes
from lowpeak.errors import ArgumentError, MissingPackageError
from lowpeak.parallel import SHARDINGS, Sharding
from lowpeak.plan.candidate import (
    ACTIVATIONS,
    BATCH,
    CACHE,
    FROZEN,
    GATHER,
    OFFLOADS,
    PARALLEL,
    SLEEPS,
    STATES,
    Candidate,
)
from lowpeak.plan.device_split import DeviceSplit, split_devices
from lowpeak.plan.plan import Plan, make_plan
from lowpeak.plan.quick_plans import QuickPlan, QuickPlanner, apply_candidate
from lowpeak.plan.request import PlanRequest

_MOST_REHEARSED = 6  # candidates that are rehearsed on their own ranks before the search gives up
_MOST_OF_STRATEGY = 2  # of these
_MOST_TRIALS = 4  # rehearsals of one candidate, with smaller sizes of its rollout
_MIB = 1 << 20
_CHUNK = "logprob_chunk_size"
_FORMATS: tuple[tuple[dict[str, Any], StorageFormat | None], ...] = (
    ({}, None),
    ({"weight_bits": 32}, StorageFormat(32, 8, 16)),
    ({"weight_bits": 16}, StorageFormat(16, 8, 16)),
    ({"weight_bits": 32, "offload_optimizer": True}, StorageFormat(32, 8, 32, offload=True)),
    ({"weight_bits": 16, "offload_optimizer": True}, StorageFormat(16, 8, 32, offload=True)),
)
_OF_FORMATS = {"weight_bits", "state_bits", "gradient_bits", "offload_optimizer", "shard_optimizer_states", "optim"}


@dataclass(frozen=True)
class Fit:
    """The chosen plan, or None if nothing fits; what was rejected and why; the smallest change with which the run would fit.

    The rejected are in order of nearness: those that would fit and are slower, then those that are too large.
    """

    plan: Plan | None
    candidate: Candidate | None
    rejected: Sequence[tuple[Candidate, str]] = ()
    smallest_change: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    split: DeviceSplit | None = None  # of a run with vLLM servers

    def as_dict(self) -> dict[str, Any]:
        """Return the choice for JSON."""
        return {
            "chosen": None if self.candidate is None else str(self.candidate),
            "arguments": dict(self.arguments),
            "rejected": [{"settings": str(candidate), "reason": reason} for candidate, reason in self.rejected],
            "smallest_change": self.smallest_change,
            "split": None if self.split is None else self.split.as_dict(),
        }


class Search:
    """A search over candidates for one run and one machine; `keeps_strategy`: with the request's strategy alone."""

    def __init__(
        self,
        request: PlanRequest,
        report: Callable[[str], object] = lambda text: None,
        factors: Mapping[str, float] | None = None,
        *,
        keeps_strategy: bool = False,
    ) -> None:
        if keeps_strategy and request.sharding.on_host:
            raise ArgumentError(
                f"--fit does not choose settings for {request.strategy}: leave out --accelerate_config, or plan without --fit."
            )
        self._request, self._report, self._factors = request, report, factors or {}
        self._keeps_strategy = keeps_strategy
        self._given: frozenset[str] = frozenset(request.args.given)
        self._planner = QuickPlanner(request, report, factors)

    def run(self) -> Fit:
        """Return the fastest candidate that fits; each of the best is rehearsed before it is chosen."""
        machine = self._request.machine
        quick_plans = self._quick_plans()
        fitting = sorted((e for e in quick_plans if e.fits(machine)), key=_preference)
        smallest = _first_by_strategy(sorted(quick_plans, key=lambda e: e.plan.peak))
        too_large = [(e.candidate, e.reason(machine)) for e in smallest if not e.fits(machine)]
        rejected: list[tuple[Candidate, str]] = []
        tried: list[tuple[QuickPlan, Plan]] = []
        for quick in _best_of_strategies(fitting):
            plan, arguments = self._rehearse(quick)
            tried.append((quick, plan))
            if plan.fits:
                known = [e.candidate for e, _ in tried]
                others = [e for e in _first_by_strategy(fitting) if e.candidate not in known]
                slower = [(e.candidate, _slower(e, quick)) for e in others]
                split = split_devices(self._planner, self._request, quick.candidate)
                return Fit(plan, quick.candidate, [*slower, *rejected, *too_large], "", arguments, split)
            rejected.append((quick.candidate, f"rehearsed: {_excess(plan)}"))
        return Fit(None, None, [*rejected, *too_large], self._smallest_change(quick_plans, tried))

    def _quick_plans(self) -> list[QuickPlan]:
        """Return the quick plans of all candidates; activations leave the device in some if nothing else fits."""
        quick_plans = [self._planner.plan(candidate) for candidate in self._candidates()]
        if ACTIVATIONS in self._given or any(e.fits(self._request.machine) for e in quick_plans):
            return quick_plans
        return quick_plans + [self._planner.plan(candidate) for candidate in self._candidates(ACTIVATIONS)]

    def _rehearse(self, quick: QuickPlan) -> tuple[Plan, dict[str, Any]]:
        """Return the rehearsed plan of a candidate, and its arguments; a rollout that does not fit gets smaller sizes."""
        sizes = dict(quick.sizes)
        self._report(f"rehearsing {quick.candidate}")
        for trial in range(_MOST_TRIALS):
            request, arguments = apply_candidate(self._request, quick.candidate, sizes)
            plan = make_plan(request, self._report).calibrated(self._factors)
            smaller = self._smaller(sizes, plan) if plan.peak_phase == "rollout" else None
            if smaller is None or trial == _MOST_TRIALS - 1:
                break
            sizes = smaller
        if _CHUNK not in self._given and self._request.kind != "reward":
            arguments[_CHUNK] = plan.sizes[_CHUNK]
        return plan, arguments

    def _smaller(self, sizes: Mapping[str, Any], plan: Plan) -> dict[str, Any] | None:
        """Return sizes with which a rollout takes what a device has; None if it has room, or if they are the least already."""
        excess = plan.peak - self._request.machine.memory
        if excess <= 0:
            return None
        for name, least in ((GATHER, 0), (CACHE, plan.inputs.least_cache_bytes)):
            if name not in self._given and sizes.get(name, 0) > least:
                return {**sizes, name: max(least, (sizes[name] - excess) // _MIB * _MIB)}
        return None

    # candidates

    def _candidates(self, *more_offloads: str) -> Iterator[Candidate]:
        for strategy, tensor_parallel in self._strategies():
            for arguments, storage in self._formats(strategy):
                rest = product(
                    self._checkpointing(),
                    self._planner.token_sizes,
                    self._offloads(strategy, storage),
                    self._engines(),
                )
                for checkpointing, tokens, offloads, (parallel, sleeps) in rest:
                    if more_offloads and not checkpointing:
                        continue
                    names = (*offloads, *more_offloads)
                    changes = {**arguments, "micro_batch_tokens": tokens, "gradient_checkpointing": checkpointing}
                    changes |= dict.fromkeys(names, True)
                    if self._planner.inputs.colocated is not None:
                        changes |= {SLEEPS: sleeps, PARALLEL: parallel}
                    if tensor_parallel > 1:  # its devices are one rank: as many sequences a step as without it
                        changes[BATCH] = tensor_parallel * self._request.args.per_device_train_batch_size
                    yield Candidate(
                        *(strategy, tensor_parallel, changes, storage, checkpointing, tokens, names, sleeps, parallel)
                    )

    def _strategies(self) -> list[tuple[str, int]]:
        if self._keeps_strategy:
            return [(self._request.strategy, self._request.tensor_parallel)]
        sizes = [size for size in self._parallel_sizes() if self._can_split_tensors(size)]
        rows = [row for row in SHARDINGS.values() if self._offers(row)]
        return [(row.name, size) for row in rows for size in (sizes if row.splits_tensors else [1])]

    def _offers(self, row: Sharding) -> bool:
        """Return whether the search tries a strategy on this machine, with the formats that are given."""
        machine = self._request.machine
        if not row.is_offered or not row.runs_on(machine.num_devices, machine.num_hosts):
            return False
        return (machine.device == "cuda" or not row.needs_gpu) and (row.has_formats or not self._given & _OF_FORMATS)

    def _can_split_tensors(self, size: int) -> bool:
        """Return whether the run can be trained by tensor parallelism over `size` devices."""
        request, machine = self._request, self._request.machine
        args: Any = request.args
        is_refused = request.peft_config is not None or request.kind == "reward" or machine.device == "cpu"
        conflicts = [getattr(args, name, False) for name in ("use_vllm", FROZEN)]
        if is_refused or any(conflicts) or getattr(args, "critic", "head") != "head":
            return False
        try:
            self._planner.inputs.check_tensor_parallel(ModelParallel(size, machine.num_devices // size))
        except (ArgumentError, MissingPackageError):
            return False
        return True

    def _parallel_sizes(self) -> list[int]:
        machine, text = self._request.machine, self._request.config.get_text_config()
        heads = (text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        sizes = [size for size in (2, 4, 8) if size <= machine.devices_on_host and machine.num_devices % size == 0]
        return [size for size in sizes if all(number % size == 0 for number in heads)]

    def _formats(self, strategy: str) -> list[tuple[dict[str, Any], StorageFormat | None]]:
        storage = self._planner.inputs.storage
        has_formats = SHARDINGS[strategy].has_formats
        if not has_formats or self._request.peft_config is not None or self._given & _OF_FORMATS or storage:
            return [({}, storage if has_formats else None)]
        offloads = self._request.machine.device == "cuda"
        formats = [each for each in _FORMATS if offloads or each[1] is None or not each[1].offload]
        return [each for each in formats if self._planner.accepts(each[0])]

    def _checkpointing(self) -> list[bool]:
        given = self._given & {"gradient_checkpointing", "activation_checkpointing"}
        return [self._planner.inputs.args.checkpoints_activations] if given else [False, True]

    def _offloads(self, strategy: str, storage: StorageFormat | None) -> list[tuple[str, ...]]:
        """Return sets of offloads: those that are given, with and without the others that act."""
        given = tuple(name for name in OFFLOADS if name in self._given and getattr(self._request.args, name))
        free = [name for name in self._acting_offloads(strategy, storage) if name not in self._given]
        sets = [given]
        for name in free:
            sets += [(*names, name) for names in sets]
        return sets

    def _acting_offloads(self, strategy: str, storage: StorageFormat | None) -> Iterator[str]:
        inputs = self._planner.inputs
        if self._request.machine.device == "cpu" or not inputs.is_online:
            return
        if self._planner.frozen_bytes and SHARDINGS[strategy].streams_frozen and self._planner.accepts({FROZEN: True}):
            yield FROZEN
        generates_here = inputs.settings.vllm is None or inputs.colocated is not None
        if generates_here and not (storage is not None and storage.offload):
            yield STATES

    def _engines(self) -> list[tuple[int, bool]]:
        """Return the devices of a colocated vLLM, and whether it sleeps while the run trains."""
        where = self._planner.inputs.colocated
        if where is None:
            return [(1, False)]
        parallel = [where.tensor_parallel_size]
        if PARALLEL not in self._given:
            parallel = [1, *self._parallel_sizes()]
        can_sleep = SLEEPS not in self._given and self._request.machine.device == "cuda"
        return list(product(parallel, (False, True) if can_sleep else (where.sleeps,)))

    # results

    def _smallest_change(self, quick_plans: Sequence[QuickPlan], tried: Sequence[tuple[QuickPlan, Plan]]) -> str:
        """Return the least change of hardware or training with which a quick plan fits, corrected by the plans that were tried."""
        machine = self._request.machine
        beyond = max((plan.peak / quick.plan.peak for quick, plan in tried), default=1.0)
        if tried:
            quick_plans = [replace(quick, plan=plan) for quick, plan in tried]
        least_host = min(quick_plans, key=lambda e: e.plan.host_peak)
        if machine.host_memory is not None and least_host.plan.host_peak > machine.host_memory:
            return f"{least_host.candidate} needs {least_host.reason_of_host(machine)}. Use hosts with more memory."
        closest = min(quick_plans, key=lambda e: e.plan.peak)
        needs = f"{closest.candidate} needs {closest.reason(machine)}"
        devices = self._enough_devices(beyond)
        if devices is not None:
            return f"{needs}. The smallest change that fits: {devices} such devices (--gpus {devices})."
        if self._request.peft_config is None:
            weights = self._planner.inputs.counts.loaded_bytes
            in_4bit = " --load_in_4bit" if weights > machine.memory else ""
            return (
                f"{needs}. Train LoRA adapters in place of all weights (--use_peft{in_4bit}), or shorten completions."
            )
        return f"{needs}. Shorten completions, or load the base in 4 bits (--load_in_4bit)."

    def _enough_devices(self, beyond: float) -> int | None:
        """Return 2, 4 or 8 times the devices if a quick plan fits on them, its peak multiplied by `beyond`; else None."""
        machine = self._request.machine
        for factor in (2, 4, 8):
            larger = replace(machine, num_devices=machine.num_devices * factor)
            if larger.num_devices % larger.devices_on_host:
                continue
            search = copy.copy(self)
            search._request = replace(self._request, machine=larger)
            search._planner = self._planner.for_request(search._request)
            if any(each.fits(larger, beyond) for each in search._quick_plans()):
                return larger.num_devices
        return None


def _preference(quick: QuickPlan) -> tuple[float, int]:
    """Return what the search minimises: the seconds of a step, then the peak.

    A candidate that changes the run's numerics or needs DeepSpeed must be faster by a margin: 3 % for weight_bits=32 and for ZeRO,
    10 % for weight_bits=16, whose rounding has noise.
    """
    return quick.seconds * _least_gain(quick.candidate), quick.plan.peak


def _least_gain(candidate: Candidate) -> float:
    gain = {None: 1.0, 32: 1.03, 16: 1.1}[candidate.arguments.get("weight_bits")]
    return candidate.sharding.least_gain * gain


def _slower(quick: QuickPlan, chosen: QuickPlan) -> str:
    """Return why a candidate that should fit was not chosen, by the quick plans of both."""
    gain = _least_gain(quick.candidate)
    is_faster = quick.seconds < chosen.seconds
    condition = f"; it must be {100 * (gain - 1):.0f} % faster than plainer ones" if is_faster else ""
    return f"about {quick.seconds:.4g} s a step, the choice {chosen.seconds:.4g} s{condition}"


def _excess(plan: Plan) -> str:
    """Return why a rehearsed plan does not fit."""
    machine = plan.request.machine
    if plan.host_excess:
        return f"{show_bytes(plan.host_peak)} of a host's memory of {show_bytes(machine.host_memory or 0)}"
    return f"{show_bytes(plan.peak)} in {plan.peak_phase}, on a device of {show_bytes(machine.memory)}"


def _best_of_strategies(quick_plans: Sequence[QuickPlan]) -> list[QuickPlan]:
    """Return the first quick plans, a few of each strategy: one that is misjudged leaves room for the others."""
    numbers: Counter[str] = Counter()
    best = []
    for quick in quick_plans:
        numbers[quick.candidate.strategy] += 1
        if numbers[quick.candidate.strategy] <= _MOST_OF_STRATEGY:
            best.append(quick)
    return best[:_MOST_REHEARSED]


def _first_by_strategy(quick_plans: Sequence[QuickPlan]) -> list[QuickPlan]:
    """Return the first quick plan of each strategy and format."""
    best: dict[tuple[str, int, StorageFormat | None], QuickPlan] = {}
    for quick in quick_plans:
        candidate = quick.candidate
        best.setdefault((candidate.strategy, candidate.tensor_parallel, candidate.storage), quick)
    return list(best.values())

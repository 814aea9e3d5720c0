"""The memory budget of a run: its bytes on a device, the sizes that a plan finds for it, and their correction by measured peaks.

Another process makes the plan before anything trains. After ten steps the automatic `micro_batch_tokens` is confirmed, halved,
or at most quadrupled, once.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch import nn

from lowpeak.arguments import MemorySettings, StorageFormat
from lowpeak.errors import ArgumentError
from lowpeak.journal import STEPS, read_rows
from lowpeak.memory import Phase, attainable_bytes, cap_allocator, free_bytes, has_device_memory, total_bytes
from lowpeak.parallel import DeviceFractions, Strategy
from lowpeak.ranks import Ranks
from lowpeak.records import Metric
from lowpeak.sizes.planned_memory import StartPlan, bytes_beside_tensors, run_description
from lowpeak.sizes.run_sizes import SYNC_BYTES, LayoutChoice, Sizes, gradient_bytes

logger = logging.getLogger(__name__)

_PLAN_SECONDS = 600
_MEASURED_STEPS = 10
_TOO_MUCH = 0.95  # of the limit: from here on micro-batches are halved
_ROOM = 0.85  # of the limit, below which the peak of larger micro-batches must stay
_MOST_FACTOR = 4
_LEAST_TOKENS = 2


def budget_bytes(memory: MemorySettings, device: torch.device, ranks: Ranks) -> int | None:
    """Return the bytes of its device that each rank may take: those of the rank that has least; None without a budget.

    Ranks on CPUs share what is free on their host. ArgumentError for more than a device has.
    """
    setting = memory.memory_budget
    if setting is None:
        return None
    total, attainable = total_bytes(device), attainable_bytes(device)
    if not has_device_memory(device):
        on_host = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks.processes.world_size)
        total = attainable = attainable - free_bytes(device) * (on_host - 1) // on_host
    with ranks.propagate_errors():
        budget = attainable if isinstance(setting, str) else int(setting * total if setting <= 1 else setting)
        if budget > total:
            raise ArgumentError(
                f"memory_budget={setting} is {_gib(budget)}, and {device} has {_gib(total)} for this rank: lower it, or set "
                "memory_budget='auto'."
            )
    return int(ranks.processes.min([budget])[0])


def resolve_sizes(
    context: Any,
    memory: MemorySettings,
    policy: nn.Module,
    strategy: Strategy,
    choice: LayoutChoice,
    shares: DeviceFractions,
    storage: StorageFormat | None,
    prompt_tokens: int | None,
    start_plan: StartPlan,
) -> tuple[Sizes, MemoryLimit, Mapping[str, float]]:
    """Return the run's sizes, its limit of memory, and the bytes by phase of a plan that was made for its budget.

    With an explicit budget on a GPU, torch raises an out-of-memory error from here on where this process would exceed it.
    """
    device, args = context.accelerator.device, context.acting_args
    budget = budget_bytes(memory, device, strategy.ranks)
    plan = plan_sizes(context, policy, strategy, budget, prompt_tokens, start_plan)
    if budget is not None and memory.memory_budget != "auto" and device.type == "cuda":
        cap_allocator(device, budget, strategy.ranks.processes.world_size)
    planned = dict(plan.sizes)
    sync_bytes = min(SYNC_BYTES, planned.pop("vllm_bucket_size", SYNC_BYTES))
    sizes = Sizes.of(
        replace(memory, **planned),
        policy,
        device,
        choice,
        strategy.ranks,
        bf16=bool(args.bf16),
        checkpointing=args.checkpoints_activations,
        shares=shares,
        storage=storage,
        budget=budget,
    )
    planned_for = None if memory.memory_budget == "auto" else budget
    sizes = replace(sizes, gather_budget=planned.get("gather_budget"), memory_budget=planned_for, sync_bytes=sync_bytes)
    return sizes, MemoryLimit.of(memory, budget, policy, device, shares, storage), plan.phases


@dataclass(frozen=True)
class BudgetPlan:
    """The sizes that a plan found, and its bytes by phase; both are empty if there is no plan."""

    sizes: Mapping[str, Any]
    phases: Mapping[str, float]


def plan_sizes(
    context: Any,
    policy: nn.Module,
    strategy: Strategy,
    budget: int | None,
    prompt_tokens: int | None,
    start_plan: StartPlan,
) -> BudgetPlan:
    """Return the sizes that keep the run within the budget, from a plan that rank 0 has made in another process.

    Raises ArgumentError if the smallest sizes exceed the budget. Without a budget, or after a warning that no plan could be made
    in ten minutes, there are none. `prompt_tokens` is the length of the longest prompt.
    """
    if budget is None:
        return BudgetPlan({}, {})
    memory = total_bytes(context.accelerator.device)
    description = run_description(context, policy, strategy, memory, {}, prompt_tokens)
    unplanned_bytes = int(strategy.ranks.processes.max([bytes_beside_tensors(context, policy)])[0])
    found = strategy.ranks.call_on_first(
        lambda: _planned({**description, "budget": budget, "unplanned_bytes": unplanned_bytes}, start_plan)
    )
    if "problem" not in found:
        return BudgetPlan({}, {})
    if found["problem"]:
        raise ArgumentError(f"the run does not fit: {found['problem']}")
    sizes = ", ".join(f"{name}={value}" for name, value in found["sizes"].items()) or "the sizes that are set"
    peak, phase = found["peak"] + unplanned_bytes, found["peak_phase"]
    logger.info(
        "Memory budget %s: planned are at most %s, in phase %s, with %s.", _gib(budget), _gib(peak), phase, sizes
    )
    return BudgetPlan(found["sizes"], found["phases"])


def _planned(description: dict[str, Any], start_plan: StartPlan) -> dict[str, Any]:
    """Return the answer of the planning process; an empty one, after a warning, if it fails or takes too long."""
    with tempfile.TemporaryDirectory(prefix="lowpeak-plan-") as folder:
        process, output = start_plan(description, Path(folder))
        try:
            status: int | str = process.wait(_PLAN_SECONDS)
        except subprocess.TimeoutExpired:
            status = f"no answer in {_PLAN_SECONDS} seconds"
        finally:
            process.kill()
            process.wait()
        lines = output.read_text(encoding="utf-8").strip().splitlines()
    if status == 0:
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
    reason = lines[-1] if lines and isinstance(status, int) else status
    logger.warning("Could not plan for memory_budget; sizes fall back to shares of free memory: %s", reason)
    return {}


# after ten steps


@dataclass(frozen=True)
class MemoryLimit:
    """What the correction of automatic sizes needs of the run's start.

    budget      bytes of memory_budget; None without one
    resident    bytes that this process had, with its models
    gradients   bytes of this rank's gradients on its device
    corrects    whether `micro_batch_tokens` is corrected: it is automatic, and there is a limit
    """

    budget: int | None
    resident: int
    gradients: int
    corrects: bool

    @classmethod
    def of(
        cls,
        memory: MemorySettings,
        budget: int | None,
        policy: nn.Module,
        device: torch.device,
        shares: DeviceFractions,
        storage: StorageFormat | None,
    ) -> MemoryLimit:
        # Without a budget a CPU has no limit that its resident memory could be compared with.
        is_limited = budget is not None or has_device_memory(device)
        return cls(
            budget,
            int(psutil.Process().memory_info().rss),
            gradient_bytes(policy, shares, storage),
            is_limited and memory.micro_batch_tokens is None,
        )


@dataclass(frozen=True)
class PassPeak:
    """The measured peak of passes, and the bytes of it that no micro-batch takes."""

    peak: int
    base: int

    def with_tokens(self, factor: float) -> int:
        """Return the peak that `factor` times the tokens would have: activations are linear in them."""
        base = min(self.base, self.peak)
        return int(base + factor * (self.peak - base))


def corrected_tokens(tokens: int, passes: Sequence[PassPeak], limit: int, *, are_full: bool) -> int:
    """Return `micro_batch_tokens` for the rest of a run: half, the same, twice or four times as many.

    Half if a peak exceeds 95 % of the limit. More if micro-batches `are_full`, as long as base + factor * (peak - base) stays
    within 85 % of the limit.
    """
    if max(each.peak for each in passes) > _TOO_MUCH * limit:
        return max(_LEAST_TOKENS, tokens // 2)
    factor = 1
    while are_full and factor < _MOST_FACTOR and max(each.with_tokens(2 * factor) for each in passes) <= _ROOM * limit:
        factor *= 2
    return factor * tokens


def correct_sizes(context: Any, metrics: Mapping[str, Metric]) -> None:
    """Confirm or correct the automatic `micro_batch_tokens` after the tenth step; log it, and journal a change.

    The peaks are the journal's, so that a resumed run decides as one that was never stopped.
    """
    run, step = context.run, context.state.global_step
    is_lowered = "micro_batch_tokens" in run.sizes.lowered  # by an out-of-memory error
    if step != _MEASURED_STEPS or not run.memory_limit.corrects or is_lowered:
        return
    ranks, device = run.strategy.ranks.processes, context.accelerator.device
    limit = run.memory_limit.budget or attainable_bytes(device)
    between_steps = _resting_bytes(context)
    least = [int(number) for number in ranks.min([limit, between_steps, between_steps + run.memory_limit.gradients])]
    peaks = ranks.call_on_first(lambda: _measured_peaks(run.journal.folder))
    bases = {Phase.TRAIN.value: least[2], Phase.SCORE.value: least[1]}
    passes = [PassPeak(peak, bases[phase]) for phase, peak in peaks.items()]
    before, trained = run.sizes.micro_batch_tokens, metrics["useful_tokens/train"]
    are_full = trained.count > before * run.strategy.ranks.world_size
    tokens = corrected_tokens(before, passes, least[0], are_full=are_full)
    shown = " and ".join(f"{_gib(peak)} in phase {phase}" for phase, peak in peaks.items())
    change = "stays" if tokens == before else f"{before} ->"
    logger.info(
        "After %d steps: at most %s, of %s: micro_batch_tokens %s %d.", step, shown, _gib(least[0]), change, tokens
    )
    if tokens != before:
        context.run = run.with_sizes(replace(run.sizes, micro_batch_tokens=tokens))
        run.journal.write_event(step, "sizes corrected", limit=least[0], peaks=peaks, micro_batch_tokens=tokens)


def _measured_peaks(folder: Path) -> dict[str, int]:
    """Return the highest peak of training and of scoring in the journal's first steps."""
    rows = [row for row in read_rows(folder, STEPS) if row["step"] <= _MEASURED_STEPS]
    found: dict[str, int] = {}
    for phase in (Phase.TRAIN.value, Phase.SCORE.value):
        peaks = [int(row[name]) for row in rows if row.get(name := f"peak_memory/{phase}")]
        if peaks:
            found[phase] = max(peaks)
    return found


def _resting_bytes(context: Any) -> int:
    """Return this rank's bytes between steps: weights, optimizer states and frozen models, without gradients.

    On a CPU, where freed memory may stay resident: what was resident before training, and the optimizer states.
    """
    device, strategy = context.accelerator.device, context.run.strategy
    if has_device_memory(device):
        return int(torch.get_device_module(device).memory_allocated(device))
    states = strategy.offloadable_tensors(context.model_wrapped, context.optimizer)
    return int(context.run.memory_limit.resident + sum(each.nbytes for each in states))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

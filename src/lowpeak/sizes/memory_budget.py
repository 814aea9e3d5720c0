"""The memory budget of a run: its bytes on a device, and the sizes that a plan finds for it.

Another process makes the plan before anything trains.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowpeak.arguments import MemorySettings, OfflineSettings, OnlineSettings, StorageFormat
from lowpeak.errors import ArgumentError
from lowpeak.memory import attainable_bytes, cap_allocator, free_bytes, has_device_memory, total_bytes
from lowpeak.parallel import DeviceFractions, Strategy
from lowpeak.ranks import Ranks
from lowpeak.sizes.planned_memory import (
    LongestPrompts,
    RunDescription,
    StartPlan,
    bytes_beside_tensors,
    run_description,
)
from lowpeak.sizes.run_sizes import SYNC_BYTES, LayoutChoice, Sizes

logger = logging.getLogger(__name__)

_PLAN_SECONDS = 600


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
    settings: OnlineSettings | OfflineSettings,
    policy: nn.Module,
    strategy: Strategy,
    choice: LayoutChoice,
    shares: DeviceFractions,
    storage: StorageFormat | None,
    longest: LongestPrompts | None,
    start_plan: StartPlan,
) -> tuple[Sizes, int | None, Mapping[str, float]]:
    """Return the run's sizes, its budget in bytes (None: it has none), and the bytes by phase of a plan that was made for it.

    With an explicit budget on a GPU, torch raises an out-of-memory error from here on where this process would exceed it.
    """
    device, args, memory = context.accelerator.device, context.acting_args, settings.memory
    budget = budget_bytes(memory, device, strategy.ranks)
    plan = plan_sizes(context, policy, strategy, budget, longest, start_plan)
    if budget is not None and memory.memory_budget != "auto" and device.type == "cuda":
        vllm = settings.vllm if isinstance(settings, OnlineSettings) else None
        sends_by_nccl = vllm is not None and vllm.may_use_nccl
        cap_allocator(device, budget, sends_by_nccl or strategy.ranks.processes.world_size > 1)
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
    return sizes, budget, plan.phases


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
    longest: LongestPrompts | None,
    start_plan: StartPlan,
) -> BudgetPlan:
    """Return sizes that keep the run within the budget, planned by rank 0 in another process.

    Raises ArgumentError if the smallest sizes exceed the budget. Without a budget, or after a warning that no plan could be made
    in ten minutes, there are none. `longest` are the lengths of the dataset's longest prompts.
    """
    if budget is None:
        return BudgetPlan({}, {})
    memory = total_bytes(context.accelerator.device)
    description = run_description(context, policy, strategy, memory, {}, longest)
    unplanned_bytes = int(strategy.ranks.processes.max([bytes_beside_tensors(context, policy)])[0])
    found = strategy.ranks.call_on_first(
        lambda: _planned(replace(description, budget=budget, unplanned_bytes=unplanned_bytes), start_plan)
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


def _planned(description: RunDescription, start_plan: StartPlan) -> dict[str, Any]:
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


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

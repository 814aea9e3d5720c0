"""How many of a run's devices serve vLLM and how many train, by the cost model and by models around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from lowpeak.parallel import SHARDINGS
from lowpeak.plan.candidate import BATCH, Candidate
from lowpeak.plan.computed import engine_memory, serves_adapters
from lowpeak.plan.cost import Work, scale_machine, step_seconds, total_seconds
from lowpeak.plan.derived_configs import with_arguments
from lowpeak.plan.hardware import Machine
from lowpeak.plan.quick_plans import QuickPlanner
from lowpeak.plan.request import PlanRequest

_URLS = "vllm_server_base_url"
_EQUAL = 1.03  # steps of up to this many times the fastest step's seconds count as equal
_FACTORS = (0.5, 1.0, 2.0)  # on the cost model's speeds and latency, which no GPU has confirmed


@dataclass(frozen=True)
class DeviceSplit:
    """Numbers of serving devices, each of which has one server; the others of `devices` train.

    current    of the run as it was given
    seconds    of a step, by the number of serving devices; without numbers for which training does not fit on the others
    range      of the number with the fastest step, over half to twice the cost model's constants
    """

    devices: int
    current: int
    seconds: Mapping[int, float]
    range: tuple[int, int]

    @property
    def fastest(self) -> int:
        return _fastest(self.seconds, self.current)

    def as_dict(self) -> dict[str, Any]:
        """Return the split for JSON."""
        return {"devices": self.devices, "serving": self.fastest, "range": self.range, "step_seconds": self.seconds}


def split_devices(planner: QuickPlanner, request: PlanRequest, candidate: Candidate) -> DeviceSplit | None:
    """Return the step's seconds by the number of serving devices; None without servers, or if one device is too small for one.

    All splits have steps of as many completions.
    """
    settings = planner.inputs.settings
    vllm = settings.vllm if planner.inputs.is_online else None
    if vllm is None or planner.inputs.colocated is not None or engine_memory(planner.inputs).parallel > 1:
        return None
    training, current = request.machine.num_devices, len(vllm.where.base_urls)
    works = {}
    least = 1 if serves_adapters(planner.inputs) else max(1, settings.max_staleness)
    for serving in range(least, training + current):
        work = _work(planner, request, candidate, serving, training + current - serving)
        if work is not None:
            works[serving] = work
    if not works:
        return None
    return compare_splits(training + current, current, works, planner.factors)


def _work(
    planner: QuickPlanner, request: PlanRequest, candidate: Candidate, serving: int, training: int
) -> tuple[Work, Machine] | None:
    """Return the work of one device with other numbers of servers and training devices; None if the run does not fit on these."""
    machine, batch = request.machine, int(request.args.per_device_train_batch_size) * request.machine.num_devices
    machine = replace(machine, num_devices=training)
    several = "ddp" if candidate.strategy == "single" else candidate.strategy
    strategy = "single" if training == 1 else several
    is_whole = not batch % training and not training % machine.devices_on_host
    if not is_whole or not SHARDINGS[strategy].runs_on(training, machine.num_hosts):
        return None
    urls = [f"http://127.0.0.1:{8000 + number}" for number in range(serving)]
    args = with_arguments(request.args, {BATCH: batch // training, _URLS: urls})
    other = planner.for_request(replace(request, machine=machine, args=args))
    found = other.plan(replace(candidate, strategy=strategy))
    return (found.plan.work, machine) if found.fits(machine) else None


def compare_splits(
    devices: int, current: int, works: Mapping[int, tuple[Work, Machine]], factors: Mapping[str, float]
) -> DeviceSplit:
    """Return the seconds of a step by the number of serving devices, and the range of the fastest one.

    `works` have the work of a training device, and its machine; `factors` calibrate the phases.
    """

    def seconds(scales: tuple[float, ...]) -> dict[int, float]:
        found = {}
        for serving, (work, machine) in works.items():
            phases = step_seconds(work, scale_machine(machine, *scales))
            calibrated = {name: factors.get(name, 1.0) * value for name, value in phases.items()}
            found[serving] = total_seconds(calibrated, overlaps=work.overlaps)
        return found

    fastest = [_fastest(seconds(scales), current) for scales in product(_FACTORS, repeat=4)]
    return DeviceSplit(devices, current, seconds((1.0,) * 4), (min(fastest), max(fastest)))


def _fastest(seconds: Mapping[int, float], current: int) -> int:
    """Return the number with the fastest step; of equal ones the current one, else the fewest servers."""
    least = min(seconds.values())
    equal = [serving for serving, value in seconds.items() if value <= _EQUAL * least]
    return current if current in equal else min(equal)

"""The plan of a run that trains, in a process of its own: `python -m lowpeak.plan.of_run REQUEST` prints bytes by phase."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from lowpeak.memory import Kind
from lowpeak.plan.hardware import Machine
from lowpeak.plan.inputs import PlanRequest
from lowpeak.plan.plan import Plan, make_plan

_LOWEST_PRIORITY = 10


def planned_bytes(plan: Plan) -> dict[str, int]:
    """Return the bytes of tensors and engines by the run's phases, in which forward and backward are one."""
    peaks = {
        name: phase.peak - phase.device.get(Kind.MARGIN, 0) for name, phase in plan.phases.items() if name != "load"
    }
    train = max(peaks.pop("forward"), peaks.pop("backward"))
    return {**peaks, "train": train}


def main(path: str) -> None:
    """Plan the run of a pickled description."""
    os.nice(_LOWEST_PRIORITY)
    description: dict[str, Any] = pickle.loads(Path(path).read_bytes())  # written by the run itself
    machine = Machine(**description.pop("machine"))
    print(json.dumps(planned_bytes(make_plan(PlanRequest(**description, machine=machine)))))


if __name__ == "__main__":
    main(sys.argv[1])

"""The plan of a run that trains, made by a separate process, which `start_plan` starts.

The process prints the bytes by phase. If the request has a budget, it prints the sizes that keep to it, too.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

from lowpeak.memory import Kind
from lowpeak.plan.budget import fit_sizes
from lowpeak.plan.hardware import Machine
from lowpeak.plan.plan import Plan, make_plan
from lowpeak.plan.request import PlanRequest
from lowpeak.sizes import RunDescription

_LOWEST_PRIORITY = 10
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ACCELERATE_",
    "FSDP_",
)


def start_plan(description: RunDescription, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a process that plans the described run; return it, and the file that it prints to."""
    request, printed = folder / "request.pkl", folder / "plan.json"
    request.write_bytes(pickle.dumps(description))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_VARIABLES)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "lowpeak.plan.plan_process", str(request)]
    with printed.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment), printed


def planned_bytes(plan: Plan) -> dict[str, int]:
    """Return the bytes of tensors and engines by the run's phases, in which forward and backward are one."""
    peaks = {
        name: phase.peak - phase.device.get(Kind.MARGIN, 0) for name, phase in plan.phases.items() if name != "load"
    }
    train = max(peaks.pop("forward"), peaks.pop("backward"))
    return {**peaks, "train": train}


def planned_request(run: RunDescription) -> PlanRequest:
    """Return the request for a plan of a run that trains."""
    return PlanRequest(
        run.kind or "",
        run.args,
        run.config,
        Machine(run.num_devices, run.memory, per_host=run.per_host, device=run.device),
        run.strategy,
        run.peft_config,
        run.reward_configs,
        run.tensor_parallel,
        run.prompt_tokens,
        run.quantized_bits,
        run.num_rewards,
        teacher_config=run.teacher_config,
        teacher_prompt_tokens=run.teacher_prompt_tokens,
    )


def main(path: str) -> None:
    """Plan the run of a pickled description."""
    run: RunDescription = pickle.loads(Path(path).read_bytes())  # written by the run itself
    request = planned_request(run)
    if run.budget is None:
        # The run trains meanwhile; with a budget it waits.
        os.nice(_LOWEST_PRIORITY)
        print(json.dumps(planned_bytes(make_plan(request))))
        return
    fit = fit_sizes(request, run.budget, run.unplanned_bytes)
    found = {"sizes": dict(fit.sizes), "problem": fit.problem, "phases": planned_bytes(fit.plan)}
    print(json.dumps({**found, "peak": fit.plan.peak, "peak_phase": fit.plan.peak_phase}))


if __name__ == "__main__":
    main(sys.argv[1])

"""The files that `lowpeak plan --fit` writes: the run's YAML, its accelerate config, and job files for Slurm or a shell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowpeak.cli.accelerate_config import preset_text
from lowpeak.cli.cloud_files import LEAD_SECONDS, CloudJob, kubernetes_file, sky_file
from lowpeak.cli.output import to_yaml
from lowpeak.cli.plan_request import gpus_of

if TYPE_CHECKING:
    from lowpeak.cli.train import Job
    from lowpeak.plan import Fit, Plan

CLOUDS = {"sky": sky_file, "k8s": kubernetes_file}

_SHELL = """\
#!/usr/bin/env bash
# Start this script on each of {hosts} host(s), with RANK_OF_HOST from 0 and HOST_0 as the address of host 0.
set -euo pipefail
exec lowpeak {kind} --config {run} --resume_from_checkpoint auto{several}
"""
_SEVERAL = (
    ' \\\n    --num_machines {hosts} --machine_rank "${{RANK_OF_HOST:?}}"'
    ' --main_process_ip "${{HOST_0:?}}" --main_process_port 29500'
)
_SLURM = """\
#!/usr/bin/env bash
#SBATCH --job-name=lowpeak-{kind}
#SBATCH --nodes={hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_host}
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@{lead}
# One task per host starts the processes of its GPUs. {lead} seconds before the time limit Slurm sends SIGTERM to the tasks, not to
# this script (that would need B:TERM). Each task is the launcher itself, by exec; it passes the signal on and waits until the run
# has saved. The exit status is then 143, or 130 of a run in one process, and the job is queued again: it resumes.
set -euo pipefail
HOST_0=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HOST_0
status=0
srun bash -c 'RANK_OF_HOST=$SLURM_NODEID exec bash {shell}' || status=$?
case $status in 130 | 143) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit "$status"
"""
_SERVER_SLURM = """\
#!/usr/bin/env bash
#SBATCH --job-name=lowpeak-serve
#SBATCH --nodes=1
#SBATCH --gpus-per-node={tensor}
# A vLLM server that generates for the run: vllm_server_base_url in {run} must name it, http://<its host>:8000. Start one for each
# URL. Run and servers need the same secret in their environment: export LOWPEAK_SERVER_TOKEN=...
set -euo pipefail
: "${{LOWPEAK_SERVER_TOKEN:?}}"
exec lowpeak serve --model {model} --host 0.0.0.0 --port 8000 --tensor_parallel_size {tensor}
"""


def write_run_files(folder: Path, job: Job, fit: Fit, emit: str | None) -> list[Path]:
    """Write run.yaml, accelerate.yaml unless one is given, and the job files that `emit` asks for; return their paths."""
    plan = fit.plan
    assert plan is not None, "a fit with a plan has files"
    folder.mkdir(parents=True, exist_ok=True)
    files = {"run.yaml": to_yaml(run_settings(job, fit.arguments, plan, folder))}
    if plan.request.machine.num_devices > 1 and job.launch.accelerate_config is None:
        files["accelerate.yaml"] = _accelerate_config(plan)
    if emit is not None:
        files |= _job_files(folder, job, plan, emit)
    paths = []
    for name, text in files.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def run_settings(job: Job, chosen: Mapping[str, Any], plan: Plan, folder: Path) -> dict[str, Any]:
    """Return the run's arguments: those that were given, those that were chosen, and where the model is placed."""
    machine = plan.request.machine
    settings = {**job.given, **chosen}
    if job.launch.accelerate_config is None:  # sizes of a mesh that were meant for another placement
        settings = {name: value for name, value in settings.items() if not name.startswith("parallelism_config_")}
    if machine.num_devices > 1:
        settings.setdefault("accelerate_config", str(folder / "accelerate.yaml"))
        settings |= _launched(plan)
    return settings


def _launched(plan: Plan) -> dict[str, int]:
    """Return the numbers of processes and hosts, and the sizes of the mesh."""
    machine, row = plan.request.machine, plan.request.sharding
    numbers = {"num_processes": machine.num_devices}
    if machine.num_hosts > 1:
        numbers["num_machines"] = machine.num_hosts
    if row.splits_tensors:
        numbers["parallelism_config_tp_size"] = plan.request.tensor_parallel
        numbers["parallelism_config_dp_shard_size"] = plan.request.world_size
    if row.copies == "per host":
        numbers["parallelism_config_dp_replicate_size"] = machine.num_hosts
        numbers["parallelism_config_dp_shard_size"] = machine.devices_on_host
    return numbers


def _accelerate_config(plan: Plan) -> str:
    """Return the strategy's preset with the plan's numbers, so that `accelerate launch` runs the planned mesh."""
    text = preset_text(plan.request.sharding.preset)
    for name, value in _launched(plan).items():
        text = re.sub(rf"^( *{name}: ).*$", rf"\g<1>{value}", text, flags=re.MULTILINE)
    return text


def _job_files(folder: Path, job: Job, plan: Plan, emit: str) -> dict[str, str]:
    from lowpeak.plan import card_name

    machine, run = plan.request.machine, folder / "run.yaml"
    per_host = machine.devices_on_host + len(gpus_of(job.given, "vllm_devices"))
    several = _SEVERAL.format(hosts=machine.num_hosts) if machine.num_hosts > 1 else ""
    files = {"train.sh": _SHELL.format(hosts=machine.num_hosts, kind=job.kind, run=run, several=several)}
    if emit == "slurm":
        numbers = {"hosts": machine.num_hosts, "per_host": per_host, "lead": LEAD_SECONDS}
        files["train.slurm"] = _SLURM.format(kind=job.kind, shell=folder / "train.sh", **numbers)
    serving = _serving(job, run)
    if serving:
        shell = "".join(line for line in serving.splitlines(keepends=True) if not line.startswith("#SBATCH"))
        files |= {"serve.slurm": serving} if emit == "slurm" else {"serve.sh": shell}
    if emit in CLOUDS:
        cloud = CloudJob(
            job.kind,
            folder / "train.sh",
            machine.num_hosts,
            per_host,
            card_name(machine.card),
            f"exec bash {folder / 'serve.sh'}" if serving else None,
            _server_gpus(job),
        )
        files[f"{emit}.yaml"] = CLOUDS[emit](cloud, folder / f"{emit}.yaml")
    return files


def _serving(job: Job, run: Path) -> str:
    """Return the job of the run's vLLM server; empty if it has none."""
    config: Any = job.config
    if not getattr(config, "use_vllm", False) or config.vllm_mode != "server" or gpus_of(job.given, "vllm_devices"):
        return ""  # the run starts servers on vllm_devices itself
    return _SERVER_SLURM.format(run=run, model=job.model.model, tensor=_server_gpus(job))


def _server_gpus(job: Job) -> int:
    return int(job.given.get("vllm_tensor_parallel_size") or 1)

"""`lowpeak env CONFIG`: check this machine against a run's config before the run: memory, devices, disk, versions, limits."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from importlib.metadata import requires
from pathlib import Path
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]
from packaging.requirements import Requirement

from lowpeak.arguments import show_bytes
from lowpeak.cli.env import installed_version
from lowpeak.cli.plan import plan_within_budget
from lowpeak.cli.plan_request import PlanArguments, machine_of, parse_plan, plan_request
from lowpeak.cli.train import with_config
from lowpeak.errors import ArgumentError, LowpeakError
from lowpeak.plan import GIB
from lowpeak.selftest import Check

if TYPE_CHECKING:
    from lowpeak.cli.train import Job
    from lowpeak.plan import Machine, Plan

_USED_PLAN_ARGUMENTS = ("algorithm", "gpus", "prompt_tokens", "teacher_prompt_tokens")
_SHARED_MEMORY = GIB  # that NCCL and data loaders of several processes share in /dev/shm
_OPEN_FILES = 4096
_KEPT_CHECKPOINTS = 2  # the last one, while the next is written


def check_machine(argv: Sequence[str]) -> int:
    """Print a line per check; return 0 if all passed, else 1."""
    options, job = parse_plan(argv, command="lowpeak env")
    for each in fields(options):
        if each.name not in _USED_PLAN_ARGUMENTS and getattr(options, each.name) != each.default:
            raise ArgumentError(
                f"--{each.name} has no effect: `lowpeak env CONFIG` checks this machine; use `lowpeak plan`."
            )
    machine, devices = _this_machine(options, job)
    checks = [devices, *_versions(job), *_limits(job, machine)]
    for check in checks:
        print(check, flush=True)
    if devices.passed:
        for check in _memory(options, job, machine):
            print(check, flush=True)
            checks.append(check)
    return 0 if all(check.passed for check in checks) else 1


def _this_machine(options: PlanArguments, job: Job) -> tuple[Machine, Check]:
    """Return this host as a machine to plan for, and whether it has the devices that the run needs."""
    import torch

    from lowpeak.plan import Machine, card_of

    wanted = options.gpus or job.launch.num_processes or 1
    host = psutil.virtual_memory().total
    if job.given.get("use_cpu"):
        return machine_of(options, job), Check("devices", True, f"{wanted} process{'es' if wanted > 1 else ''} on CPUs")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (found, wanted, job.launch.accelerate_config) == (0, 1, None):
        return _cpu_without_gpu(options, job)
    hosts = job.launch.num_machines or 1
    enough = found * hosts >= wanted
    text = f"{wanted} needed, this host has {found} GPUs that torch can use"
    if not enough:
        text += ": lower --num_processes, name more hosts by --num_machines, or train on CPUs with --use_cpu"
    if not found:
        return Machine(wanted, 0, host), Check("devices", enough, text)
    properties = torch.cuda.get_device_properties(0)
    machine = Machine(wanted, properties.total_memory, host, -(-wanted // hosts), card_of(properties.name))
    return machine, Check("devices", enough, text)


def _cpu_without_gpu(options: PlanArguments, job: Job) -> tuple[Machine, Check]:
    """Return this host's CPU, where one process trains if torch finds no GPU and no argument needs one."""
    machine = machine_of(options, replace(job, given={**job.given, "use_cpu": True}))
    try:
        with_config(job)
    except LowpeakError as error:
        return machine, Check("devices", False, f"torch finds no GPU: {error}")
    return machine, Check("devices", True, "torch finds no GPU: the run trains on CPUs")


def _versions(job: Job) -> Iterator[Check]:
    needed = {
        "torch": True,
        "transformers": True,
        "accelerate": True,
        "peft": job.model.use_peft,
        "bitsandbytes": job.model.load_in_4bit or job.model.load_in_8bit,
        "deepspeed": "zero" in str(job.launch.accelerate_config or ""),
        "vllm": getattr(job.config, "use_vllm", False) and getattr(job.config, "vllm_mode", "") == "colocate",
    }
    supported = {each.name: each.specifier for each in map(Requirement, requires("lowpeak") or [])}
    for package in (name for name, is_needed in needed.items() if is_needed):
        version = installed_version(package)
        if version == "not installed":
            yield Check(package, False, f"not installed: install {package}{supported[package]}")
            continue
        passed = supported[package].contains(version, prereleases=True)
        yield Check(package, passed, version if passed else f"{version}, needs {supported[package]}")


def _limits(job: Job, machine: Machine) -> Iterator[Check]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Check(
        "open files", files >= _OPEN_FILES, f"{files} allowed" + ("" if files >= _OPEN_FILES else ": ulimit -n 65536")
    )
    if machine.num_devices > 1:
        yield from _limits_of_ranks(machine)
    if job.given.get("offload_optimizer") and machine.device == "cuda":
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        unlimited = locked in (resource.RLIM_INFINITY, -1)
        yield Check("locked memory", unlimited, "unlimited" if unlimited else f"{locked} bytes: ulimit -l unlimited")


def _limits_of_ranks(machine: Machine) -> Iterator[Check]:
    import torch

    backend = "gloo" if machine.device == "cpu" else "nccl"
    available = torch.distributed.is_available() and torch.distributed.is_backend_available(backend)
    yield Check("process groups", available, f"{backend} is {'' if available else 'not '}in this build of torch")
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0  # where NCCL shares memory
    text = show_bytes(shared) + ("" if shared >= _SHARED_MEMORY else ": start the container with --shm-size=8g")
    yield Check("/dev/shm", shared >= _SHARED_MEMORY, text)


def _memory(options: PlanArguments, job: Job, machine: Machine) -> Iterator[Check]:
    """Plan the run on this machine; compare its peaks with the memory, and its checkpoints with the disk."""
    from lowpeak.memory import free_bytes

    try:
        plan, problem = plan_within_budget(plan_request(options, job, machine))
    except LowpeakError as error:
        yield Check("plan", False, str(error))
        return
    if plan.inputs.generation:
        yield Check("generation", True, plan.inputs.generation)
    yield Check("layout", True, str(plan.inputs.layout_choice))
    limit = plan.request.machine.memory
    process_note = "" if machine.device == "cuda" else " (without the process itself)"
    where = f"{show_bytes(plan.peak)} in {plan.peak_phase}{process_note}, of {show_bytes(limit)}"
    fits = plan.peak <= limit
    remedy = "" if fits else ": `lowpeak plan --fit` chooses settings that fit"
    yield Check("device memory", fits and not problem, problem or where + remedy)
    if machine.device == "cuda":  # on CPUs the tensors are the host's
        free = free_bytes("cpu")
        text = f"{show_bytes(plan.host_peak)}, of {show_bytes(free)} that this container may still use"
        yield Check("host memory", plan.host_peak <= free, text)
    folder = Path(job.config.output_dir)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    needed, available = _checkpoint_bytes(plan) * _KEPT_CHECKPOINTS, shutil.disk_usage(existing).free
    text = f"{show_bytes(needed)} for {_KEPT_CHECKPOINTS} checkpoints, {show_bytes(available)} free in {existing}"
    yield Check("disk", needed <= available, text)


def _checkpoint_bytes(plan: Plan) -> int:
    """Return the bytes of a checkpoint: the model, trained weights in fp32, and AdamW's two moments."""
    return 2 * plan.counts.total + 12 * plan.counts.trained

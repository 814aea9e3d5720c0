"""The arguments of `lowpeak plan`, the machine, and the run that a job describes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowpeak.arguments import CLASS_PREFIXES, Check, device_argument, logging_argument, parse_bytes
from lowpeak.cli.devices import read_devices
from lowpeak.cli.output import print_once
from lowpeak.cli.train import Job, lora_config, read_job, with_config
from lowpeak.cli.vllm_devices import add_server_urls
from lowpeak.errors import ArgumentError, ModelError

if TYPE_CHECKING:
    from lowpeak.plan import Machine, PlanRequest


_LEAST_MEMORY = 1 << 20  # bytes of a device or a host; less is a number without its unit
_GPUS_PER_HOST = 8
PLANNED_FOLDER = "runs/plan"  # output_dir of a run that names none


@dataclass(frozen=True)
class PlanArguments:
    """Arguments of the command itself: the planned machine, the output and its files."""

    algorithm: str = logging_argument(
        "grpo", f"what to plan: one of {', '.join(CLASS_PREFIXES)}; its arguments are accepted, too"
    )
    gpus: int | None = device_argument(None, "number of GPUs; by default --num_processes, or 1")
    gpu: str | None = device_argument(
        None, "name of the card, such as h100, a100-40 or rtx4090, for its memory and speed"
    )
    gpu_memory: str | None = device_argument(None, "memory of a GPU, such as 80GiB; by default the card's")
    gpus_per_host: int | None = device_argument(
        None, "GPUs of a host; by default those of each of --num_machines hosts, or 8"
    )
    host_memory: str | None = device_argument(None, "memory of a host, such as 1TiB; by default it is no limit")
    prompt_tokens: int = device_argument(512, "tokens of a prompt, for which the run is planned")
    teacher_prompt_tokens: int | None = device_argument(
        None,
        "tokens of a prompt with its privileged_context, as a teacher reads it; by default --prompt_tokens, and a "
        "completion more with --use_successful_as_teacher",
    )
    price_per_hour: float | None = device_argument(
        None, "dollars per GPU hour, for the price of the run; GPUs of --vllm_devices count too"
    )
    prices: str | None = device_argument(
        None,
        "dollars per GPU hour by card, as h100=2.50,a100=1.60 or a YAML file: hours and dollars on each, the cheapest first",
    )
    fit: bool = logging_argument(
        False, "choose placement, formats, micro-batches and offloads so that the run fits and is fastest"
    )
    format: str = logging_argument("text", "print a table (text) or json")
    plot: str | None = logging_argument(None, "write a plot of the phases to this HTML file")
    emit: str | None = logging_argument(None, "write job files for --fit's choice: slurm, shell, sky (SkyPilot) or k8s")
    output: str = logging_argument("plan", "folder of the files that --fit writes")
    journal: str | None = logging_argument(None, "output_dir of a similar run, whose times calibrate the cost model")


def parse_plan(argv: Sequence[str], command: str = "lowpeak plan") -> tuple[PlanArguments, Job]:
    """Return the command's own arguments, and the job that they plan, with its trainer's config."""
    if argv and argv[0].replace("_", "-") in CLASS_PREFIXES:
        raise ArgumentError(
            f"{command} reads the algorithm from --algorithm: write {command} --algorithm {argv[0]} ..."
        )
    options, job = read_job(_algorithm(argv), argv, command, own=PlanArguments)
    if not job.model.model:
        raise ArgumentError(f"{command} needs --model: a folder, a config.json or a hub name.")
    _check_options(options)
    if (job.model.load_in_4bit or job.model.load_in_8bit) and not job.model.use_peft:
        raise ArgumentError("a quantised model is frozen, so that nothing would be trained: add --use_peft.")
    given = {"output_dir": PLANNED_FOLDER, **job.given}
    # bitsandbytes is not needed to plan a quantised base.
    plain = dataclasses.replace(job.model, load_in_4bit=False, load_in_8bit=False)
    # Without a GPU transformers refuses bf16=True unless the run is on CPUs.
    on_cpu = {**add_server_urls(given), "use_cpu": True}
    config = with_config(dataclasses.replace(job, model=plain, given=on_cpu)).config
    config.given = frozenset(config.given) - ({"use_cpu"} if "use_cpu" not in given else set())
    return options, dataclasses.replace(job, config=config, given=given)


def _algorithm(argv: Sequence[str]) -> str:
    """Return the algorithm that the command line or a YAML file names; its config decides which other names exist."""
    from lowpeak.arguments import load_yaml

    joined = ("--config=", "--algorithm=")
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith(joined) else (word,))]
    kind = PlanArguments.algorithm
    for word, value in pairwise(words):
        if word == "--config":
            kind = str(load_yaml(value).get("algorithm", kind))
    for word, value in pairwise(words):
        if word == "--algorithm":
            kind = value
    kind = kind.replace("_", "-")
    if kind not in CLASS_PREFIXES:
        raise ArgumentError(f"--algorithm {kind} does not exist; use one of {', '.join(CLASS_PREFIXES)}.")
    return kind


_CHECKS: Mapping[str, Check] = {
    "format": Check(lambda x: x in ("text", "json"), "must be one of text, json"),
    "emit": Check(lambda x: x in ("slurm", "shell", "sky", "k8s"), "must be one of slurm, shell, sky, k8s"),
    "plot": Check(lambda x: x.endswith((".html", ".htm")), "must be a file that ends in .html, since it writes a page"),
    **dict.fromkeys(
        ("gpus_per_host", "prompt_tokens", "teacher_prompt_tokens"), Check(lambda x: x >= 1, "must be at least 1")
    ),
    "gpus": Check(lambda x: 1 <= x <= 1 << 14, "must be from 1 to 16,384"),
    "price_per_hour": Check(lambda x: 0 < x < float("inf"), "must be dollars above 0"),
}


def _check_options(options: PlanArguments) -> None:
    for name, check in _CHECKS.items():
        value = getattr(options, name)
        if value is not None and not check.accepts(value):
            raise ArgumentError(f"--{name} {check.requirement}, got {value!r}.")
    if options.prices is not None:
        _check_priced(options)
    if options.emit == "sky" and options.gpu is None:
        raise ArgumentError("--emit sky names the card to rent: add --gpu.")
    for name in ("emit", "output"):
        if not options.fit and getattr(options, name) != getattr(PlanArguments, name):
            raise ArgumentError(
                f"--{name} is for the files of the settings that --fit chooses: add --fit, or leave it out."
            )


def _check_priced(options: PlanArguments) -> None:
    for name in ("gpu", "gpu_memory", "price_per_hour", "plot", "emit", "journal"):
        if getattr(options, name) is not None:
            raise ArgumentError(
                f"--{name} has no effect with --prices, which plans each card of its own: remove one of the two."
            )
    if options.output != PlanArguments.output:
        raise ArgumentError(
            "--output has no effect with --prices, which writes no files of a run: remove one of the two."
        )


def machine_of(options: PlanArguments, job: Job) -> Machine:
    """Return the machine that the arguments describe: GPUs, or with --use_cpu this host's CPU."""
    from lowpeak.memory import free_bytes
    from lowpeak.plan import CARDS, Machine, find_card, measure_cpu

    devices = training_devices(options, job)
    host = None if options.host_memory is None else _bytes("host_memory", options.host_memory)
    if job.given.get("use_cpu"):
        if options.gpu is not None:
            raise ArgumentError("--gpu has no effect with --use_cpu: remove one of the two.")
        memory = (
            free_bytes("cpu") // devices if options.gpu_memory is None else _bytes("gpu_memory", options.gpu_memory)
        )
        return Machine(devices, memory, host, devices, measure_cpu(), device="cpu")
    if options.gpu is None and options.gpu_memory is None:
        raise ArgumentError(
            f"lowpeak plan needs the GPU's memory: --gpu_memory 80GiB, or --gpu with one of {', '.join(CARDS)}."
        )
    card = find_card(options.gpu or "a100")
    memory = card.memory if options.gpu_memory is None else _bytes("gpu_memory", options.gpu_memory)
    return Machine(devices, memory, host, _gpus_per_host(options, job, devices), card)


def _gpus_per_host(options: PlanArguments, job: Job, gpus: int) -> int:
    """Return the GPUs of a host; ArgumentError if the last one of several hosts would have fewer."""
    hosts = job.launch.num_machines or 1
    if gpus % hosts:
        raise ArgumentError(f"{gpus} GPUs are not a multiple of --num_machines {hosts}: each host has equally many.")
    per_host = options.gpus_per_host or (gpus // hosts if hosts > 1 else _GPUS_PER_HOST)
    if gpus > per_host and gpus % per_host:
        whole = gpus // per_host * per_host
        divisor = max(number for number in range(1, per_host) if gpus % number == 0)
        raise ArgumentError(
            f"{gpus} GPUs are not a multiple of {per_host} per host: set --gpus {whole} or {whole + per_host}, "
            f"or --gpus_per_host {divisor}."
        )
    return per_host


def _bytes(name: str, text: str) -> int:
    size = parse_bytes(text)
    if size is None or size <= 0:
        raise ArgumentError(f"--{name} must be a size such as 80GiB or 500GB, got {text!r}.")
    if size < _LEAST_MEMORY:
        raise ArgumentError(f"--{name} {text} is {size} bytes: give a unit, such as {text}GiB.")
    return size


def plan_request(options: PlanArguments, job: Job, machine: Machine) -> PlanRequest:
    """Return the run that the job describes, on a machine; print a warning if it leaves the model's context."""
    from lowpeak.plan import PlanRequest, check_context

    strategy, tensor_parallel = _placement(job, machine)
    teacher = getattr(job.config, "teacher_model_name_or_path", None)
    request = PlanRequest(
        kind=job.kind,
        args=job.config,
        config=_model_config(job.model.model, job.config),
        machine=machine,
        strategy=strategy,
        peft_config=lora_config(job.model, job.kind),
        reward_configs=[_model_config(name, job.config) for name in _reward_models(job)],
        tensor_parallel=tensor_parallel,
        prompt_tokens=options.prompt_tokens,
        teacher_prompt_tokens=_teacher_prompt_tokens(options, job),
        has_tools=bool(job.tools.tools or job.tools.environment),
        num_rewards=max(1, len(job.rewards.specs)),
        teacher_config=None if teacher is None else _model_config(teacher, job.config),
        quantized_bits=4 if job.model.load_in_4bit else 8 if job.model.load_in_8bit else None,
    )
    warning = check_context(request)
    if warning:
        print_once(f"warning: {warning}")
    return request


def _teacher_prompt_tokens(options: PlanArguments, job: Job) -> int:
    """Return the tokens of a teacher's prompts; 0 if they are the policy's."""
    if options.teacher_prompt_tokens is not None and job.kind != "distillation":
        raise ArgumentError(f"--teacher_prompt_tokens has no effect: {job.kind} has no teacher; remove it.")
    return options.teacher_prompt_tokens or 0


def _default_strategy(machine: Machine) -> str:
    from lowpeak.cli.accelerate_config import DEFAULT_PRESET

    if machine.num_devices == 1:
        return "single"
    return "ddp" if machine.device == "cpu" else DEFAULT_PRESET


def _placement(job: Job, machine: Machine) -> tuple[str, int]:
    """Return the strategy by the accelerate config's name, and the size of tensor parallel groups."""
    from lowpeak.cli.accelerate_config import strategy_of

    name = job.launch.accelerate_config
    if name is None:
        return _default_strategy(machine), 1
    strategy, tensor = strategy_of(name)
    tensor = job.launch.parallelism_config_tp_size or tensor
    if machine.num_devices % tensor:
        raise ArgumentError(f"--gpus {machine.num_devices} cannot be split into tensor parallel groups of {tensor}.")
    if strategy == "single" and machine.num_devices > 1:
        raise ArgumentError(f"--accelerate_config {name} trains on one device: set --gpus 1, or another config.")
    if strategy != "single" and machine.num_devices == 1:
        raise ArgumentError(f"--accelerate_config {name} places the model on several devices: set --gpus.")
    return strategy, tensor


def _reward_models(job: Job) -> list[str]:
    named = job.rewards.reward_model_name_or_path
    return [spec for spec in job.rewards.specs if spec == named or (Path(spec) / "config.json").is_file()]


def _model_config(name: str, args: Any) -> Any:
    from transformers import AutoConfig

    from lowpeak.models import from_pretrained

    try:
        return from_pretrained(AutoConfig, name, trust_remote_code=args.trust_remote_code)
    except ModelError as error:
        if Path(name).exists():
            raise
        raise ModelError(f"{error} A folder with the model's config.json is enough for a plan.") from error


def gpus_of(given: Mapping[str, Any], name: str) -> list[str]:
    """Return the GPUs that an argument such as `train_devices` lists; none if it is not given."""
    devices = given.get(name)
    return [] if devices is None else [each for each in read_devices(devices, f"--{name}") if each != "cpu"]


def training_devices(options: PlanArguments, job: Job) -> int:
    """Return the devices that train: --gpus, --num_processes, the devices of --train_devices, or 1."""
    listed = len(gpus_of(job.given, "train_devices"))
    number = options.gpus or job.launch.num_processes or listed or 1
    if listed and number != listed:
        raise ArgumentError(f"--train_devices names {listed} GPUs, but the plan is for {number}: set one of the two.")
    return number


def total_hourly_price(options: PlanArguments, job: Job) -> float | None:
    """Return the dollars of an hour of all GPUs, those of vLLM's servers included; None without a price."""
    gpus = training_devices(options, job) + len(gpus_of(job.given, "vllm_devices"))
    return None if options.price_per_hour is None else gpus * options.price_per_hour

"""`lowpeak grpo|rloo|ppo|online-dpo|distillation|sft|reward|dpo|kto`: parse arguments, build the trainer, train, save."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import lowpeak
from lowpeak.arguments import CLASS_PREFIXES, EffectReport, hide_secrets
from lowpeak.cli.arguments import (
    DataArguments,
    JudgeArguments,
    LaunchArguments,
    ModelArguments,
    RewardArguments,
    RunArguments,
    ServingArguments,
    ToolSourceArguments,
)
from lowpeak.cli.dataset import ANSWER_COLUMNS, load_datasets
from lowpeak.cli.launch import is_rank_zero, launch_or_join, output_folder
from lowpeak.cli.output import hide_bars_in_files, show_log, to_yaml
from lowpeak.cli.vllm_devices import run_with_servers, trainer_settings
from lowpeak.errors import ArgumentError, LowpeakError, MemoryExhaustedError, first_line, require_package

Part = TypeVar("Part")
# Arguments that a script's own call of evaluate() reads, and a command only if eval_strategy is set.
_EVALUATION_ARGUMENTS = ("per_device_eval_batch_size", "num_generations_eval", "success_reward", "success_threshold")
_ADAPTER_ARGUMENTS = [
    name for name in ModelArguments.__annotations__ if name.startswith(("lora_", "use_rslora", "use_dora"))
]
_QUANTIZATION_ARGUMENTS = ("bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant")
# TRL's defaults where lowpeak's differ: a file that spells them out is not told that they have no effect.
_TRL_DEFAULTS = {"model_revision": "main", "eval_split": "test", "lora_dropout": 0.05, "per_device_eval_batch_size": 8}
_RESULTS = "results.json"
_PEAKS = ("peak_memory", "reserved_memory", "planned_memory")
_NUM_FINAL_REWARDS = 10  # steps whose mean reward is that of the run's end


@dataclass(frozen=True)
class Job:
    """All arguments of a command; `given` are those that the user set."""

    kind: str
    model: ModelArguments
    data: DataArguments
    rewards: RewardArguments
    tools: ToolSourceArguments
    run: RunArguments
    launch: LaunchArguments
    config: Any
    given: Mapping[str, Any]

    @property
    def online(self) -> bool:
        """Whether the job trains on its own completions."""
        return self.kind not in ANSWER_COLUMNS


def run_training(kind: str, argv: Sequence[str], library: Any = lowpeak) -> int:
    """Train, or with `--dry_run` print the resolved settings; return the exit status.

    `library` has the configs and trainers as attributes. With `--accelerate_config` this process starts the same command once
    per device and waits for it; with `--vllm_devices` it starts vLLM servers and the same command.
    """
    parsed = parse_job(kind, argv, library)
    status = run_with_servers(kind, argv, parsed.given)
    if status is None:
        on_cpu, folder = bool(parsed.given.get("use_cpu")), output_folder(parsed.given)
        status = launch_or_join(parsed.launch, [kind, *argv], folder, on_cpu=on_cpu)
    if status is not None:
        return status
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `python -m lowpeak` has it: rewards may be modules of this folder
    hide_bars_in_files()
    job = with_config(parsed, library)
    with show_log(job.config):
        _train(job, library)
    return 0


def _train(job: Job, library: Any) -> None:
    from lowpeak.setup import check_resume

    check_resume(job.config)
    from lowpeak.models import allow_missing_weights

    with _explain_setup_errors(job.config.device), allow_missing_weights() if job.run.dry_run else nullcontext():
        trainer = make_trainer(job, library)
    if job.run.dry_run:
        resolved = trainer.dry_run()
        if is_rank_zero(os.environ):
            print(to_yaml({"arguments": job.given} | resolved), end="")
        return
    earlier, is_complete = _read_steps(job), _has_results(job)
    trainer.train()
    if not (trainer.was_finished and is_complete):
        trainer.save_model()
        if is_rank_zero(os.environ):
            write_results(job, trainer, earlier)
    if job.config.push_to_hub:
        from lowpeak.data import is_on_hub

        name = job.data.dataset
        trainer.push_to_hub(dataset_name=name if name and is_on_hub(name) else None)


@contextmanager
def _explain_setup_errors(device: Any) -> Iterator[None]:
    """Raise a LowpeakError in place of transformers' or peft's errors for bad arguments or too little memory."""
    from lowpeak.memory import is_out_of_memory

    try:
        yield
    except LowpeakError:
        raise
    except (ImportError, MemoryError, RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise MemoryExhaustedError(
                f"the models do not fit in the memory of {device}: {first_line(error)}. `lowpeak plan` with the same "
                "arguments shows the memory that they need; --fit chooses settings that fit."
            ) from error
        raise ArgumentError(
            f"the run cannot be set up: {first_line(error)}. Correct the argument that this names; set LOWPEAK_TRACEBACK=1 in the "
            "environment to see the traceback."
        ) from error


def _read_steps(job: Job, earlier: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return the journal's steps without the `earlier` ones, or all if there are no others."""
    from lowpeak.journal import read_steps

    rows = list(read_steps(Path(job.config.output_dir) / "journal"))
    return [row for row in rows if row not in earlier] or rows


def _has_results(job: Job) -> bool:
    """Return whether the results of the last checkpoint exist, which are written after the model."""
    from lowpeak.checkpoint import last_checkpoint

    last, results = last_checkpoint(Path(job.config.output_dir)), Path(job.config.output_dir, _RESULTS)
    return last is not None and results.is_file() and results.stat().st_mtime >= last.stat().st_mtime


def write_results(job: Job, trainer: Any, earlier: Sequence[Mapping[str, Any]]) -> None:
    """Write results.json next to the model: the machine, the arguments, and the journal's measurements.

    `step_time`, `tokens_per_second` and `seconds` by phase are medians without the first value; `peak_memory` and
    `reserved_memory` by phase are the largest bytes. `outside_bytes` of the device are not of torch's allocator. `reward` is the
    mean of the last ten. The steps of `earlier` invocations count only if there are no others: a kill may come before them.
    """
    from lowpeak.cli.env import environment_facts
    from lowpeak.journal import EVALUATIONS, EVENTS, read_rows

    folder = Path(job.config.output_dir)
    steps = _read_steps(job, earlier)
    evaluations = list(read_rows(folder / "journal", EVALUATIONS))
    if not steps:
        return
    rewards = _group_metrics(steps, "reward").get("")
    results = {
        "run": folder.name,
        "command": job.kind,
        "date": date.today().isoformat(),
        "arguments": hide_secrets(dict(job.given)),
        "environment": environment_facts(),
        "device": str(job.config.device),
        "devices": job.config.world_size,
        "steps": steps[-1]["step"],
        "seconds": {phase: _typical(values) for phase, values in _group_metrics(steps, "time/").items()},
        **{name: _typical(_group_metrics(steps, name)[""]) for name in ("step_time", "tokens_per_second")},
        **{
            kind: {phase: max(values) for phase, values in _group_metrics(steps, f"{kind}/").items()} for kind in _PEAKS
        },
        "outside_bytes": _measure_outside_bytes(job.config.device),
        "reward": statistics.fmean(rewards[-_NUM_FINAL_REWARDS:]) if rewards else None,
        "evaluation": evaluations[-1] if evaluations else {},
        **{name: getattr(trainer.state, name) for name in ("best_model_checkpoint", "best_metric")},
        "events": Counter(row["event"] for row in read_rows(folder / "journal", EVENTS)),
    }
    (folder / _RESULTS).write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")


def _typical(values: Sequence[float]) -> float:
    """Return the median without the first value, which includes compilation; the first if there is no other."""
    return statistics.median(values[1:] or values)


def _group_metrics(steps: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, list[float]]:
    """Return the metrics whose names begin with `prefix`, by the rest of their names."""
    found: dict[str, list[float]] = {}
    for row in steps:
        for name, value in row.items():
            if name.startswith(prefix) and value is not None:
                found.setdefault(name.removeprefix(prefix), []).append(float(value))
    return found


def _measure_outside_bytes(device: Any) -> int | None:
    """Return the bytes of a device that are taken and not torch's allocator's; None on a CPU."""
    import torch

    from lowpeak.memory import has_device_memory, used_bytes

    if not has_device_memory(device):
        return None
    return used_bytes(device) - torch.get_device_module(device).memory_reserved(device)


def parse_job(kind: str, argv: Sequence[str], library: Any = lowpeak) -> Job:
    """Return the parsed arguments, without the trainer's config: creating the config initialises the devices."""
    _, job = read_job(kind, argv, f"lowpeak {kind}", library)
    check_job(job)
    return job


def read_job(
    kind: str, argv: Sequence[str], program: str, library: Any = lowpeak, own: type | None = None
) -> tuple[Any, Job]:
    """Return the command's `own` arguments, and the job that the others describe, without its trainer's config."""
    from lowpeak.cli.parser import argument_names, parse_arguments, pop_arguments

    config_class = getattr(library, f"{CLASS_PREFIXES[kind]}Config")
    judging = JudgeArguments if kind == "online-dpo" else RewardArguments
    kinds = [*filter(None, [own]), ModelArguments, DataArguments, RunArguments, LaunchArguments, config_class]
    kinds += [] if kind in ANSWER_COLUMNS else [judging, ToolSourceArguments, ServingArguments]
    given = parse_arguments(kinds, argv, program, getattr(config_class, "rejected", {}))
    options = pop_arguments(own, given) if own else None

    def pick(part: type[Part]) -> Part:
        return part(**{name: given[name] for name in argument_names(part) & given.keys() if part in kinds})

    parts: Any = map(pick, (ModelArguments, DataArguments, judging, ToolSourceArguments, RunArguments, LaunchArguments))
    return options, Job(*(kind, *parts, None, given))


def with_config(job: Job, library: Any = lowpeak) -> Job:
    """Return the job with its trainer's config; ArgumentError with the config's message if it refuses an argument."""
    config_class = getattr(library, f"{CLASS_PREFIXES[job.kind]}Config")
    known = {field.name for field in dataclasses.fields(config_class) if field.init}
    settings = {name: value for name, value in trainer_settings(job.given, os.environ).items() if name in known}
    options = load_options(job.model)
    if options:
        from lowpeak.arguments import rename_dtype

        given = rename_dtype(settings.get("model_init_kwargs") or {})
        twice = [name for name in options if given.get(name, options[name]) != options[name]]
        if twice:
            raise ArgumentError(
                f"model_init_kwargs and an argument of the command set {twice[0]!r} differently: set one."
            )
        settings = {**settings, "model_init_kwargs": {**options, **given}}
    try:
        return dataclasses.replace(job, config=config_class(**settings))
    except LowpeakError:
        raise
    except (TypeError, ValueError) as error:
        raise ArgumentError(str(error)) from error


def load_options(model: ModelArguments) -> dict[str, Any]:
    """Return model_init_kwargs from the command's other arguments."""
    options = {"dtype": model.dtype, "attn_implementation": model.attn_implementation, "revision": model.model_revision}
    options = {name: value for name, value in options.items() if value is not None}
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if getattr(model, name)]
    if len(bits) > 1:
        raise ArgumentError("--load_in_4bit and --load_in_8bit cannot both be set: remove one.")
    if not bits:
        return options
    require_package("bitsandbytes", f"--{bits[0]}", "quantization")
    quantization: dict[str, Any] = {"quant_method": "bitsandbytes", bits[0]: True}
    if model.load_in_4bit:
        quantization |= {"bnb_4bit_quant_type": model.bnb_4bit_quant_type}
        quantization |= {"bnb_4bit_use_double_quant": True} if model.use_bnb_nested_quant else {}
        quantization |= {"bnb_4bit_quant_storage": model.bnb_4bit_quant_storage} if model.bnb_4bit_quant_storage else {}
        quantization |= {"bnb_4bit_compute_dtype": model.dtype} if model.dtype not in (None, "auto") else {}
    return {**options, "quantization_config": quantization}


def check_job(job: Job) -> None:
    """Raise ArgumentError for a missing model, dataset or reward, and for a frozen model without --use_peft."""
    dataset = job.data.dataset or job.data.datasets or job.tools.environment  # which may open its conversations itself
    required = {"model": job.model.model, "dataset": dataset, **_required(job)}
    if missing := [f"--{name}" for name, value in required.items() if not value]:
        raise ArgumentError(
            f"lowpeak {job.kind} needs {' and '.join(missing)}, on the command line or in the file of --config."
        )
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(job.model, name) and not job.model.use_peft:
            raise ArgumentError(f"--{name} freezes the model: add --use_peft to train adapters on it, or leave it out.")


def _required(job: Job) -> dict[str, Any]:
    """Return the missing parts of the algorithm, by the arguments that give them: a teacher, or a reward."""
    if job.kind == "distillation":
        teachers = ("teacher_model_name_or_path", "teacher_model_kind")
        return {" or --".join(teachers): job.model.use_peft or any(map(job.given.get, teachers))}
    names = [each.name for each in dataclasses.fields(job.rewards)]
    # An environment may have a reward of its own; its trainer says so if it has none.
    is_given = any([job.tools.environment, *(getattr(job.rewards, name) for name in names)])
    return {" or --".join(names): is_given} if job.online else {}


def _add_idle(job: Job, effects: EffectReport) -> None:
    """Add the command's arguments without effect; ArgumentError for data to evaluate on that the command never reads."""
    model = job.model
    reasons: dict[str, str] = {}
    if not model.use_peft:
        reasons |= dict.fromkeys(_ADAPTER_ARGUMENTS, "--use_peft is off, so there are no adapters")
    if not model.load_in_4bit:
        reasons |= dict.fromkeys(_QUANTIZATION_ARGUMENTS, "--load_in_4bit is off")
    if job.config.eval_strategy == "no" and not job.config.eval_on_start:
        if job.data.eval_dataset is not None:
            raise ArgumentError(
                "--eval_dataset has no effect: eval_strategy is 'no', so the command never evaluates; add --eval_strategy steps "
                "(or epoch), or leave it out (`--eval_dataset null` does if a file sets it)."
            )
        never = "eval_strategy is 'no', so the command never evaluates"
        reasons |= dict.fromkeys(("eval_split", *(_EVALUATION_ARGUMENTS if job.online else ())), never)
    if Path(model.model).exists():
        reasons["model_revision"] = "the model is a folder"
    for name, reason in reasons.items():
        if _is_set(job, name):
            effects.add(f"--{name} {job.given[name]}", reason)


def _is_set(job: Job, name: str) -> bool:
    """Return whether an argument was given with another value than its default here, and than TRL's."""
    kinds = (type(job.model), type(job.data), type(job.config))
    defaults = [each.default for kind in kinds for each in dataclasses.fields(kind) if each.name == name]
    return name in job.given and job.given[name] not in (*defaults, _TRL_DEFAULTS.get(name))


def make_trainer(job: Job, library: Any = lowpeak) -> Any:
    """Return the trainer with its model, data, rewards and adapters, as a script would construct it."""
    from lowpeak.rewards import load_object

    effects = EffectReport(job.config)
    _add_idle(job, effects)
    effects.report()
    train_dataset, eval_dataset = load_datasets(job.data, ANSWER_COLUMNS.get(job.kind, ()), job.config, effects)
    keywords: dict[str, Any] = {
        "model": job.model.model,
        "args": job.config,
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "peft_config": lora_config(job.model, job.kind),
    }
    if job.online:
        keywords |= {"reward_funcs": job.rewards.load_rewards(), **job.tools.load()}
    if isinstance(job.rewards, JudgeArguments) and job.rewards.judge is not None:
        keywords["judge"] = load_object(job.rewards.judge, "Judge")
    return getattr(library, f"{CLASS_PREFIXES[job.kind]}Trainer")(**keywords)


def lora_config(model: ModelArguments, kind: str) -> Any:
    """Return peft's LoRA config, or None without `use_peft`; a reward model's whole score head is trained, too."""
    if not model.use_peft:
        return None
    require_package("peft", "--use_peft", "peft")
    from peft import LoraConfig

    targets: Any = model.lora_target_modules
    return LoraConfig(
        task_type=model.lora_task_type or ("SEQ_CLS" if kind == "reward" else "CAUSAL_LM"),
        r=model.lora_r,
        lora_alpha=model.lora_alpha,
        lora_dropout=model.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        target_parameters=model.lora_target_parameters,
        modules_to_save=model.lora_modules_to_save,
        use_rslora=model.use_rslora,
        use_dora=model.use_dora,
    )

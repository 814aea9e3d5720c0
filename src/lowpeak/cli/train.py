"""`lowpeak grpo|rloo|ppo|online-dpo|sft|reward`: parse, build a trainer out of what was asked for, train, save."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lowpeak
from lowpeak.arguments import hide_secrets
from lowpeak.cli.arguments import (
    DataArguments,
    JudgeArguments,
    LaunchArguments,
    ModelArguments,
    RewardArguments,
    RunArguments,
    ServingArguments,
)
from lowpeak.cli.columns import shape
from lowpeak.cli.launch import is_first, launch_or_join
from lowpeak.cli.vllm_devices import handed_over, run_beside_servers
from lowpeak.errors import ArgumentError, LowpeakError, first_line, require_package

logger = logging.getLogger(__name__)

Part = TypeVar("Part")
NAMES = {"grpo": "GRPO", "rloo": "RLOO", "ppo": "PPO", "online-dpo": "OnlineDPO", "sft": "SFT", "reward": "Reward"}
# What follows the prompt in the rows of a job that learns from them alone, so that nothing is generated or rewarded.
ANSWERS = {"sft": ("completion",), "reward": ("chosen", "rejected")}
_TASKS = {"reward": "SEQ_CLS"}


@dataclass(frozen=True)
class Job:
    """All that a command was told; `given` is what the user wrote, the rest are defaults."""

    kind: str
    model: ModelArguments
    data: DataArguments
    rewards: RewardArguments
    run: RunArguments
    launch: LaunchArguments
    config: Any
    given: Mapping[str, Any]

    @property
    def online(self) -> bool:
        """Whether the job learns from what it generates, and so needs a reward."""
        return self.kind not in ANSWERS


def run(kind: str, argv: Sequence[str], library: Any = lowpeak) -> int:
    """Train, or with `--dry_run` print what was resolved. `library` holds the configurations and trainers by name.

    With `--accelerate_config` the same command is started once for each device, and this process waits for them; with
    `--vllm_devices` it is started beside the servers.
    """
    told = read_words(kind, argv, library)
    status = run_beside_servers(kind, argv, told.given)
    if status is None:
        status = launch_or_join(told.launch, [kind, *argv], on_cpu=bool(told.given.get("use_cpu")))
    if status is not None:
        return status
    from lowpeak.setup import check_resume

    job = configured(told, library)
    resume = checkpoint_to_resume(job.config.resume_from_checkpoint)
    if not job.run.dry_run:
        check_resume(Path(job.config.output_dir), resume)
    try:
        trainer = make_trainer(job, library)
    except LowpeakError:
        raise
    except (ImportError, RuntimeError, ValueError) as error:  # transformers' or peft's own words about an argument
        raise ArgumentError(
            f"the run cannot be set up: {first_line(error)}. Correct the argument that this is about; with LOWPEAK_TRACEBACK=1 in "
            "the environment its origin is shown."
        ) from error
    if job.run.dry_run:
        resolved = trainer.dry_run()
        if is_first(os.environ):
            print(dump({"arguments": job.given} | resolved), end="")
        return 0
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    if job.config.push_to_hub:
        from lowpeak.data import is_on_hub

        name = job.data.dataset
        trainer.push_to_hub(dataset_name=name if is_on_hub(name) else None)
    return 0


def read_words(kind: str, argv: Sequence[str], library: Any = lowpeak) -> Job:
    """Return what was told, without the trainer's configuration: making that one takes the devices."""
    from lowpeak.cli.parser import names_of, parse

    config_class = getattr(library, f"{NAMES[kind]}Config")
    judging = JudgeArguments if kind == "online-dpo" else RewardArguments
    online = kind not in ANSWERS
    own: list[type] = [ModelArguments, DataArguments, RunArguments, LaunchArguments]
    own += [judging, ServingArguments] if online else []
    given = parse([*own, config_class], argv, f"lowpeak {kind}", getattr(config_class, "rejected", {}))

    def pick(part: type[Part]) -> Part:
        return part(**{name: given[name] for name in names_of(part) & given.keys() if part in own})

    model, data, rewards = pick(ModelArguments), pick(DataArguments), pick(judging)
    job = Job(kind, model, data, rewards, pick(RunArguments), pick(LaunchArguments), config=None, given=given)
    check(job)
    return job


def configured(job: Job, library: Any = lowpeak) -> Job:
    """Return the job with its trainer's configuration; what that refuses is an error with its own words."""
    config_class = getattr(library, f"{NAMES[job.kind]}Config")
    known = {field.name for field in dataclasses.fields(config_class) if field.init}
    settings = {name: value for name, value in handed_over(job.given, os.environ).items() if name in known}
    if job.model.load_in_4bit:
        quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        require_package("bitsandbytes", "--load_in_4bit", "quantization")
        options = {**(settings.get("model_init_kwargs") or {}), "quantization_config": quantization}
        settings = {**settings, "model_init_kwargs": options}
    try:
        return dataclasses.replace(job, config=config_class(**settings))
    except LowpeakError:
        raise
    except (TypeError, ValueError) as error:
        raise ArgumentError(str(error)) from error


def check(job: Job) -> None:
    """Refuse a job without a model, data or rewards, and settings of adapters that no adapter would see."""
    required: dict[str, Any] = {"model": job.model.model, "dataset": job.data.dataset}
    if job.online:
        names = [each.name for each in dataclasses.fields(job.rewards)]
        required[" or --".join(names)] = any(getattr(job.rewards, name) for name in names)
    missing = [f"--{name}" for name, value in required.items() if not value]
    if missing:
        raise ArgumentError(
            f"lowpeak {job.kind} needs {' and '.join(missing)}, on the command line or in the file of --config."
        )
    if job.model.use_peft:
        return
    defaults = ModelArguments()
    for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit"):
        if getattr(job.model, name) != getattr(defaults, name):
            raise ArgumentError(f"--{name} has no effect without --use_peft; add --use_peft, or leave it out.")


def make_trainer(job: Job, library: Any = lowpeak) -> Any:
    """Return the trainer with its model, data, rewards and adapters; the same constructor that a script would call."""
    from lowpeak.rewards import load_judge, load_reward

    train_dataset, eval_dataset = load_data(job)
    keywords: dict[str, Any] = {
        "model": job.model.model,
        "args": job.config,
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "peft_config": lora(job.model, _TASKS.get(job.kind, "CAUSAL_LM")) if job.model.use_peft else None,
    }
    if job.online:
        keywords["reward_funcs"] = [load_reward(spec) for spec in job.rewards.reward or []]
    if isinstance(job.rewards, JudgeArguments) and job.rewards.judge is not None:
        keywords["judge"] = load_judge(job.rewards.judge)
    return getattr(library, f"{NAMES[job.kind]}Trainer")(**keywords)


def load_data(job: Job) -> tuple[Any, Any]:
    """Return the data set to train on and, where one was asked for, the one to evaluate on."""
    from lowpeak.data import open_dataset

    data = job.data

    def open_one(source: str, split: str | None, config: str | None) -> Any:
        if Path(source).exists():  # the file takes the place of the hub's name that a configuration file gave
            _warn_idle(source, split, config)
            split, config = local_split(Path(source), split), None
        return shape(open_dataset(source, split, config), data, ANSWERS.get(job.kind, ()))

    train = open_one(data.dataset, data.dataset_split, data.dataset_config)
    if data.eval_dataset is None and data.eval_split is None:
        return train, None
    same = data.eval_dataset in (None, data.dataset)
    return train, open_one(data.eval_dataset or data.dataset, data.eval_split, data.dataset_config if same else None)


def _warn_idle(source: str, split: str | None, config: str | None) -> None:
    """Say which words about a hub's data set do nothing for a local file or folder."""
    named = None if split is None or Path(source).is_dir() else split.partition("[")[0]
    idle = {"split": named if named != "train" else None, "dataset_config": config}
    for name, value in idle.items():
        if value is not None and is_first(os.environ):
            logger.warning(
                "The %s %r has no effect: %s is a local file or folder, which has none.", name, value, source
            )


def local_split(source: Path, split: str | None) -> str | None:
    """Return a file's own split, of any name: `test[:64]` of it is its first 64 rows. Folders have splits by name."""
    if split is None or source.is_dir():
        return split
    return "train" + split[split.index("[") :] if "[" in split else None


def lora(model: ModelArguments, task: str) -> Any:
    """Return the adapters' configuration for peft, which also trains the whole head of a classifier."""
    require_package("peft", "--use_peft", "peft")
    from peft import LoraConfig

    targets: Any = model.lora_target_modules
    return LoraConfig(
        task_type=task,
        r=model.lora_r,
        lora_alpha=model.lora_alpha,
        lora_dropout=model.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )


def checkpoint_to_resume(value: str | bool | None) -> str | bool | None:
    """Return True for `true`, the newest checkpoint of the output folder; a path as it is; None to start afresh."""
    return {"true": True, "false": None, "none": None}.get(str(value).lower(), value)


def dump(resolved: Any) -> str:
    """Return what a dry run resolved, as YAML without access tokens; values that YAML has no word for are shown as text."""
    import yaml

    return yaml.safe_dump(hide_secrets(plain(resolved)), sort_keys=False, allow_unicode=True, width=110)


def plain(value: Any) -> Any:
    """Return mappings, sequences and scalars as YAML knows them, anything else as its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)

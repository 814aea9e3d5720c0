"""Arguments of the command beside the trainer's config: model, adapters, data, rewards, devices."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from lowpeak.arguments import (
    data_argument,
    device_argument,
    generation_argument,
    logging_argument,
    model_argument,
    reward_argument,
)
from lowpeak.cli.accelerate_config import PRESETS
from lowpeak.errors import ArgumentError


class ErrorParser(argparse.ArgumentParser):
    """An argparse parser that raises ArgumentError instead of printing the usage of two hundred arguments."""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): invalid (\w+) value: ", r"\1 must be of type \2, got ", message)
        raise ArgumentError(f"{message[:1].upper()}{message[1:]}; `{self.prog} --help` lists the arguments.")


@dataclass
class ModelArguments:
    """The model, its adapters, and the precision it is loaded in."""

    model: str = model_argument("", "model to train: a folder or a hub name (required)")
    model_revision: str | None = model_argument(None, "branch, tag or commit of a hub model")
    dtype: str | None = model_argument(
        None, "dtype of the weights: auto (the checkpoint's, the default), float32, bfloat16 or float16"
    )
    attn_implementation: str | None = model_argument(None, "attention implementation, by transformers' names")
    load_in_4bit: bool = model_argument(
        False, "load the frozen base model in 4 bits (needs bitsandbytes and --use_peft)"
    )
    load_in_8bit: bool = model_argument(
        False, "load the frozen base model in 8 bits (needs bitsandbytes and --use_peft)"
    )
    bnb_4bit_quant_type: str = model_argument("nf4", "4-bit format: nf4 or fp4")
    bnb_4bit_quant_storage: str | None = model_argument(None, "dtype that the 4-bit weights are stored as")
    use_bnb_nested_quant: bool = model_argument(False, "quantize the scales of 4-bit weights too")
    use_peft: bool = model_argument(False, "train LoRA adapters on a frozen base model (needs peft)")
    lora_r: int = model_argument(16, "rank of the adapters (r)")
    lora_alpha: int = model_argument(32, "alpha of the adapters: their output is scaled by alpha / r")
    lora_dropout: float = model_argument(0.0, "dropout probability in the adapters")
    lora_target_modules: list[str] | None = model_argument(
        None, "names of modules that get adapters, or all-linear; by default peft's choice for the architecture"
    )
    lora_target_parameters: list[str] | None = model_argument(
        None, "names of parameters that get adapters, such as those of experts"
    )
    lora_modules_to_save: list[str] | None = model_argument(
        None, "names of modules that are trained whole, beside the adapters"
    )
    lora_task_type: str | None = model_argument(
        None, "task type of the adapters; by default CAUSAL_LM, and SEQ_CLS for reward models"
    )
    use_rslora: bool = model_argument(False, "scale the adapters' output by alpha / sqrt(r)")
    use_dora: bool = model_argument(False, "train weight-decomposed adapters (DoRA)")


@dataclass(frozen=True)
class DataArguments:
    """The dataset, and which of its columns are the prompt and, in supervised training, its answers."""

    dataset: str = data_argument(
        "",
        "a .json, .jsonl, .parquet or .csv file, a save_to_disk folder, or a hub name (required without --environment)",
    )
    datasets: list[dict[str, Any]] | None = data_argument(
        None,
        "in place of --dataset: datasets to concatenate, each a mapping of path, name, data_dir, data_files, split, columns and "
        "fraction, as in TRL (JSON, or a path alone)",
    )
    dataset_config: str | None = data_argument(None, "configuration name of a hub dataset")
    dataset_split: str | None = data_argument(
        None, "split to train on, or a slice such as train[:1000]; by default train"
    )
    eval_dataset: str | None = data_argument(
        None, "dataset to evaluate on; by default --dataset, if --eval_split is set"
    )
    eval_split: str | None = data_argument(
        None, "split to evaluate on, or a slice such as test[:64]; required for a hub dataset"
    )
    test_split_size: float | None = data_argument(
        None, "rows to hold out of the training data and evaluate on: a fraction below 1, or a number"
    )
    streaming: bool = data_argument(False, "read the data as streams, which need --max_steps")
    prompt_column: str = data_argument("prompt", "column with the prompt")
    completion_column: str = data_argument("completion", "column with the completion (sft, kto)")
    chosen_column: str = data_argument("chosen", "column with the better answer (reward, dpo)")
    rejected_column: str = data_argument("rejected", "column with the worse answer (reward, dpo)")
    conversational: bool = data_argument(False, "wrap string prompts in a chat with one user message")
    system_prompt: str | None = data_argument(None, "system message that opens every chat")


@dataclass(frozen=True)
class RewardArguments:
    """The reward functions or models."""

    reward: list[str] | None = reward_argument(
        None,
        "rewards, each as path/to/file.py:function, package.module.function, a reward model, or a built-in function: "
        "exact_match, numeric_match, accuracy_reward, reasoning_accuracy_reward, think_answer_format, think_format_reward, "
        "hash_answer_format, length_penalty; with arguments, such as linear_length(0.01): format_reward, linear_length, "
        "soft_overlong, get_soft_overlong_punishment, get_cosine_scaled_reward, get_repetition_penalty_reward",
    )
    reward_model_name_or_path: str | None = reward_argument(None, "a reward model, as the first of the rewards")

    @property
    def specs(self) -> list[str]:
        """The names of all rewards, the reward model first."""
        model = self.reward_model_name_or_path
        return [*([model] if model else []), *(self.reward or ())]

    def load_rewards(self) -> list[Any]:
        """Return the trainer's `reward_funcs`: functions, and names of models."""
        from lowpeak.rewards import load_reward

        num_models = bool(self.reward_model_name_or_path)
        return [*self.specs[:num_models], *map(load_reward, self.specs[num_models:])]


@dataclass(frozen=True)
class JudgeArguments(RewardArguments):
    """The reward functions or models, or a judge that compares completions."""

    judge: str | None = reward_argument(
        None, "in place of rewards: path/to/file.py:object or package.module.object, an object with a method judge"
    )


@dataclass(frozen=True)
class ToolSourceArguments:
    """The tools and environments that the policy talks to."""

    tools: list[str] | None = generation_argument(
        None, "tools that the policy may call, each as path/to/file.py:function or package.module.function"
    )
    environment: list[str] | None = generation_argument(
        None,
        "class of the environment, as path/to/file.py:Class, package.module.Class, gymnasium:ID, openenv:URL or verifiers:NAME; "
        "several as NAME=..., where NAME is a row's value in the column environment",
    )

    def load(self) -> dict[str, Any]:
        """Return the trainer's `tools`, and its `environment_factory`: a factory, a mapping of factories, or None."""
        from lowpeak.environments import load_environment
        from lowpeak.rewards import load_object

        named = [_named(spec) for spec in self.environment or ()]
        names = {name for name, _ in named}
        if len(named) > 1 and len(names - {""}) < len(named):
            raise ArgumentError(
                "--environment has several values: write each as NAME=environment, with a name of its own."
            )
        classes = {name: load_environment(spec) for name, spec in named}
        tools = [load_object(spec, "Tool") for spec in self.tools or ()]
        return {"tools": tools, "environment_factory": classes.get("", classes) or None}


def _named(spec: str) -> tuple[str, str]:
    """Return the name and the environment of NAME=environment; no name before an address with a = of its own."""
    name, equals, rest = spec.partition("=")
    return (name, rest) if equals and ":" not in name else ("", spec)


@dataclass(frozen=True)
class CheckArguments(ToolSourceArguments, RewardArguments, DataArguments):
    """The arguments of `lowpeak check` besides the trainer's config."""

    model: str | None = model_argument(None, "model whose tokenizer is used; by default a built-in one")
    seconds: float = logging_argument(60.0, "seconds of training on the CPU")


@dataclass(frozen=True)
class RunArguments:
    """The command's own arguments of a run."""

    dry_run: bool = logging_argument(
        False, "print the resolved model, data, arguments and micro-batches, and do not train"
    )


@dataclass(frozen=True)
class LaunchArguments:
    """Number of devices and placement of the model on them; names and meanings are those of `accelerate launch`."""

    accelerate_config: str | None = device_argument(
        None,
        f"placement of the model on several devices: an accelerate config file, or one of {', '.join(PRESETS)}",
    )
    num_processes: int | None = device_argument(
        None, "processes over all hosts, one per device; by default this host's devices x hosts"
    )
    num_machines: int | None = device_argument(None, "number of hosts; start the same command on each")
    machine_rank: int | None = device_argument(None, "index of this host, from 0")
    main_process_ip: str | None = device_argument(None, "address of host 0")
    main_process_port: int | None = device_argument(None, "free port on host 0")
    gpu_ids: str | None = device_argument(None, "indexes of this host's devices to use, such as 0,1,3")
    rdzv_backend: str | None = device_argument(None, "rendezvous backend of the hosts: static or c10d")
    rdzv_conf: str | None = device_argument(None, "settings of the rendezvous, such as timeout=600")
    max_restarts: int | None = device_argument(None, "number of times that all processes are restarted after one fails")
    monitor_interval: float | None = device_argument(None, "seconds between checks of the processes")
    num_cpu_threads_per_process: int | None = device_argument(None, "CPU threads per process")
    parallelism_config_dp_replicate_size: int | None = device_argument(
        None, "copies of the model (hsdp; by default one per host)"
    )
    parallelism_config_dp_shard_size: int | None = device_argument(
        None, "devices that each copy is sharded over by FSDP (hsdp, fsdp2-tp; by default all)"
    )
    parallelism_config_tp_size: int | None = device_argument(
        None, "neighbouring devices that tensors are split over (fsdp2-tp; by default 2)"
    )


@dataclass(frozen=True)
class ServingArguments:
    """Which of this machine's devices train and which generate, if one command starts both."""

    train_devices: str | None = device_argument(
        None, "devices to train on, such as 0,3; by default those that are not in --vllm_devices"
    )
    vllm_devices: str | None = device_argument(
        None,
        "start vLLM servers on these devices, such as 1,2, for the duration of the run, each on vllm_tensor_parallel_size "
        "devices; cpu starts one server on the CPU",
    )

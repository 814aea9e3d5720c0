"""Arguments of the command beside the trainer's config: model, adapters, data, rewards, devices."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import NoReturn

from lowpeak.arguments import data_argument, device_argument, logging_argument, model_argument, reward_argument
from lowpeak.cli.accelerate_config import PRESETS
from lowpeak.errors import ArgumentError


class ErrorParser(argparse.ArgumentParser):
    """An argparse parser that raises ArgumentError instead of printing the usage of two hundred arguments."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message[:1].upper()}{message[1:]}; `{self.prog} --help` lists the arguments.")


@dataclass(frozen=True)
class ModelArguments:
    """The model, its adapters, and the precision it is loaded in."""

    model: str = model_argument("", "model to train: a folder or a hub name (required)")
    load_in_4bit: bool = model_argument(
        False, "load the frozen base model in 4 bits (NF4; needs bitsandbytes and --use_peft)"
    )
    use_peft: bool = model_argument(False, "train LoRA adapters on a frozen base model (needs peft)")
    lora_r: int = model_argument(16, "rank of the adapters (r)")
    lora_alpha: int = model_argument(32, "alpha of the adapters: their output is scaled by alpha / r")
    lora_dropout: float = model_argument(0.0, "dropout probability in the adapters")
    lora_target_modules: list[str] | None = model_argument(
        None, "names of modules that get adapters, or all-linear; by default peft's choice for the architecture"
    )


@dataclass(frozen=True)
class DataArguments:
    """The dataset, and which of its columns are the prompt and, in supervised training, its answers."""

    dataset: str = data_argument(
        "", "a .json, .jsonl, .parquet or .csv file, a save_to_disk folder, or a hub name (required)"
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
    prompt_column: str = data_argument("prompt", "column with the prompt")
    completion_column: str = data_argument("completion", "column with the completion (sft)")
    chosen_column: str = data_argument("chosen", "column with the better answer (reward)")
    rejected_column: str = data_argument("rejected", "column with the worse answer (reward)")
    conversational: bool = data_argument(False, "wrap string prompts in a chat with one user message")
    system_prompt: str | None = data_argument(None, "system message that opens every chat")


@dataclass(frozen=True)
class RewardArguments:
    """The reward functions or models."""

    reward: list[str] | None = reward_argument(
        None, "rewards, each as path/to/file.py:function, package.module.function or a reward model"
    )


@dataclass(frozen=True)
class JudgeArguments(RewardArguments):
    """The reward functions or models, or a judge that compares completions."""

    judge: str | None = reward_argument(
        None, "in place of rewards: path/to/file.py:object or package.module.object, an object with a method judge"
    )


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

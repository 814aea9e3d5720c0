"""What a command is told besides the trainer's own configuration: model, adapters, data, rewards."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import NoReturn

from lowpeak.config.declare import argument
from lowpeak.errors import ArgumentError


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are our errors, without the usage of two hundred arguments."""

    def error(self, message: str) -> NoReturn:
        """Raise it as ours."""
        raise ArgumentError(f"{message[:1].upper()}{message[1:]}; `{self.prog} --help` lists the arguments.")


@dataclass(frozen=True)
class ModelArguments:
    """The model, and the adapters and the precision that it is loaded with."""

    model: str = argument("", "model", "model to train: a folder or a hub name (required)")
    load_in_4bit: bool = argument(
        False, "model", "load the frozen base in 4 bits (NF4, needs bitsandbytes and --use_peft)"
    )
    use_peft: bool = argument(False, "model", "train LoRA adapters on a frozen base (needs peft)")
    lora_r: int = argument(16, "model", "rank of the adapters")
    lora_alpha: int = argument(32, "model", "scale of the adapters, over their rank")
    lora_dropout: float = argument(0.0, "model", "dropout in the adapters")
    lora_target_modules: list[str] | None = argument(
        None, "model", "modules that get adapters, or all-linear; by default what peft knows for the architecture"
    )


@dataclass(frozen=True)
class DataArguments:
    """Where the rows come from, and how a row becomes a prompt (and, where rows are trained on, its answers)."""

    dataset: str = argument(
        "", "data", "a .json, .jsonl, .parquet or .csv file, a save_to_disk folder, or a hub name (required)"
    )
    dataset_config: str | None = argument(
        None, "data", "name of the hub data set's configuration (a local file has none)"
    )
    dataset_split: str | None = argument(
        None, "data", "split to train on, or a slice as in train[:1000]; by default train"
    )
    eval_dataset: str | None = argument(
        None, "data", "data set to evaluate on; --dataset when only --eval_split is given"
    )
    eval_split: str | None = argument(
        None, "data", "split to evaluate on, or a slice as in test[:64]; needed for a hub name"
    )
    prompt_column: str = argument("prompt", "data", "column that holds the prompt")
    completion_column: str = argument("completion", "data", "column that holds the completion (sft)")
    chosen_column: str = argument("chosen", "data", "column that holds the better answer (reward)")
    rejected_column: str = argument("rejected", "data", "column that holds the worse answer (reward)")
    conversational: bool = argument(False, "data", "wrap a prompt that is a string in a chat: one message of the user")
    system_prompt: str | None = argument(None, "data", "message of the system that opens every chat")


@dataclass(frozen=True)
class RewardArguments:
    """What judges the completions."""

    reward: list[str] | None = argument(
        None,
        "rewards",
        "path/to/file.py:function, package.module.function or a reward model; several get --reward_weights",
    )


@dataclass(frozen=True)
class JudgeArguments(RewardArguments):
    """What judges the completions, where a judge may compare them."""

    judge: str | None = argument(
        None, "rewards", "in place of rewards: path/to/file.py:object or package.module.object, with a method judge"
    )


@dataclass(frozen=True)
class RunArguments:
    """What to do with all of it."""

    dry_run: bool = argument(
        False, "logging", "resolve model, data, arguments and micro-batches, print them, and do not train"
    )


@dataclass(frozen=True)
class LaunchArguments:
    """On how many devices to run, and how the model lies on them; names and meanings are those of `accelerate launch`."""

    accelerate_config: str | None = argument(
        None,
        "several devices",
        "how the model lies on several devices: a config file of accelerate's, or one of single, ddp, fsdp2, "
        "fsdp2-offload, hsdp, fsdp2-tp, zero1, zero2, zero3, zero3-offload",
    )
    num_processes: int | None = argument(
        None, "several devices", "processes over all hosts, one a device; by default this host's devices x hosts"
    )
    num_machines: int | None = argument(None, "several devices", "hosts; the same command is started on each")
    machine_rank: int | None = argument(None, "several devices", "number of this host, from 0")
    main_process_ip: str | None = argument(None, "several devices", "address of host 0")
    main_process_port: int | None = argument(None, "several devices", "port on host 0 that nobody uses")
    gpu_ids: str | None = argument(None, "several devices", "devices of this host to use, as in 0,1,3")
    rdzv_backend: str | None = argument(None, "several devices", "how hosts meet: static or c10d")
    rdzv_conf: str | None = argument(None, "several devices", "more of it, as in timeout=600")
    max_restarts: int | None = argument(
        None, "several devices", "start all processes again at most so often when one fails"
    )
    monitor_interval: float | None = argument(None, "several devices", "seconds between looks at the processes")
    num_cpu_threads_per_process: int | None = argument(None, "several devices", "CPU threads of a process")
    parallelism_config_dp_replicate_size: int | None = argument(
        None, "several devices", "hsdp: copies of the model (by default one a host)"
    )
    parallelism_config_dp_shard_size: int | None = argument(
        None, "several devices", "hsdp, fsdp2-tp: devices that rows of a copy are cut over (by default all)"
    )
    parallelism_config_tp_size: int | None = argument(
        None, "several devices", "fsdp2-tp: devices, next to each other, that tensors are cut over (by default 2)"
    )


@dataclass(frozen=True)
class ServingArguments:
    """Which of this machine's devices train and which generate, where one command starts both."""

    train_devices: str | None = argument(
        None, "several devices", "devices to train on, as in 0,3; by default all that vLLM does not get"
    )
    vllm_devices: str | None = argument(
        None,
        "several devices",
        "start vLLM servers on these devices, as in 1,2, for as long as the run lasts: as many as "
        "vllm_tensor_parallel_size divides them into; cpu is one server without a device",
    )

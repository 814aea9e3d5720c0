"""What a command is told besides the trainer's own configuration: model, adapters, data, rewards."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import NoReturn

from lowpeak.arguments import in_data, in_devices, in_logging, in_model, in_rewards
from lowpeak.cli.accelerate_config import ORDER
from lowpeak.errors import ArgumentError


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are our errors, without the usage of two hundred arguments."""

    def error(self, message: str) -> NoReturn:
        """Raise it as ours."""
        raise ArgumentError(f"{message[:1].upper()}{message[1:]}; `{self.prog} --help` lists the arguments.")


@dataclass(frozen=True)
class ModelArguments:
    """The model, and the adapters and the precision that it is loaded with."""

    model: str = in_model("", "model to train: a folder or a hub name (required)")
    load_in_4bit: bool = in_model(False, "load the frozen base in 4 bits (NF4, needs bitsandbytes and --use_peft)")
    use_peft: bool = in_model(False, "train LoRA adapters on a frozen base (needs peft)")
    lora_r: int = in_model(16, "rank of the adapters")
    lora_alpha: int = in_model(32, "scale of the adapters, over their rank")
    lora_dropout: float = in_model(0.0, "dropout in the adapters")
    lora_target_modules: list[str] | None = in_model(
        None, "modules that get adapters, or all-linear; by default what peft knows for the architecture"
    )


@dataclass(frozen=True)
class DataArguments:
    """Where the rows come from, and how a row becomes a prompt (and, where rows are trained on, its answers)."""

    dataset: str = in_data(
        "", "a .json, .jsonl, .parquet or .csv file, a save_to_disk folder, or a hub name (required)"
    )
    dataset_config: str | None = in_data(None, "name of the hub data set's configuration (a local file has none)")
    dataset_split: str | None = in_data(None, "split to train on, or a slice as in train[:1000]; by default train")
    eval_dataset: str | None = in_data(None, "data set to evaluate on; --dataset when only --eval_split is given")
    eval_split: str | None = in_data(None, "split to evaluate on, or a slice as in test[:64]; needed for a hub name")
    prompt_column: str = in_data("prompt", "column that holds the prompt")
    completion_column: str = in_data("completion", "column that holds the completion (sft)")
    chosen_column: str = in_data("chosen", "column that holds the better answer (reward)")
    rejected_column: str = in_data("rejected", "column that holds the worse answer (reward)")
    conversational: bool = in_data(False, "wrap a prompt that is a string in a chat: one message of the user")
    system_prompt: str | None = in_data(None, "message of the system that opens every chat")


@dataclass(frozen=True)
class RewardArguments:
    """What judges the completions."""

    reward: list[str] | None = in_rewards(
        None, "path/to/file.py:function, package.module.function or a reward model; several get --reward_weights"
    )


@dataclass(frozen=True)
class JudgeArguments(RewardArguments):
    """What judges the completions, where a judge may compare them."""

    judge: str | None = in_rewards(
        None, "in place of rewards: path/to/file.py:object or package.module.object, with a method judge"
    )


@dataclass(frozen=True)
class RunArguments:
    """What to do with all of it."""

    dry_run: bool = in_logging(False, "resolve model, data, arguments and micro-batches, print them, and do not train")


@dataclass(frozen=True)
class LaunchArguments:
    """On how many devices to run, and how the model lies on them; names and meanings are those of `accelerate launch`."""

    accelerate_config: str | None = in_devices(
        None,
        f"how the model lies on several devices: a config file of accelerate's, or one of {', '.join(ORDER)}",
    )
    num_processes: int | None = in_devices(
        None, "processes over all hosts, one a device; by default this host's devices x hosts"
    )
    num_machines: int | None = in_devices(None, "hosts; the same command is started on each")
    machine_rank: int | None = in_devices(None, "number of this host, from 0")
    main_process_ip: str | None = in_devices(None, "address of host 0")
    main_process_port: int | None = in_devices(None, "port on host 0 that nobody uses")
    gpu_ids: str | None = in_devices(None, "devices of this host to use, as in 0,1,3")
    rdzv_backend: str | None = in_devices(None, "how hosts meet: static or c10d")
    rdzv_conf: str | None = in_devices(None, "more of it, as in timeout=600")
    max_restarts: int | None = in_devices(None, "start all processes again at most so often when one fails")
    monitor_interval: float | None = in_devices(None, "seconds between looks at the processes")
    num_cpu_threads_per_process: int | None = in_devices(None, "CPU threads of a process")
    parallelism_config_dp_replicate_size: int | None = in_devices(
        None, "hsdp: copies of the model (by default one a host)"
    )
    parallelism_config_dp_shard_size: int | None = in_devices(
        None, "hsdp, fsdp2-tp: devices that rows of a copy are cut over (by default all)"
    )
    parallelism_config_tp_size: int | None = in_devices(
        None, "fsdp2-tp: devices, next to each other, that tensors are cut over (by default 2)"
    )


@dataclass(frozen=True)
class ServingArguments:
    """Which of this machine's devices train and which generate, where one command starts both."""

    train_devices: str | None = in_devices(
        None, "devices to train on, as in 0,3; by default all that vLLM does not get"
    )
    vllm_devices: str | None = in_devices(
        None,
        "start vLLM servers on these devices, as in 1,2, for as long as the run lasts: as many as "
        "vllm_tensor_parallel_size divides them into; cpu is one server without a device",
    )

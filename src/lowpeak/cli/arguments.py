"""What a command is told besides the trainer's own configuration: model, adapters, data, rewards."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelArguments:
    """The model, and the adapters and the precision that it is loaded with."""

    model: str = field(default="", metadata={"help": "model to train: a folder or a hub name (required)"})
    load_in_4bit: bool = field(
        default=False, metadata={"help": "load the frozen base in 4 bits (NF4, needs bitsandbytes and --use_peft)"}
    )
    use_peft: bool = field(default=False, metadata={"help": "train LoRA adapters on a frozen base (needs peft)"})
    lora_r: int = field(default=16, metadata={"help": "rank of the adapters"})
    lora_alpha: int = field(default=32, metadata={"help": "scale of the adapters, over their rank"})
    lora_dropout: float = field(default=0.0, metadata={"help": "dropout in the adapters"})
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "modules that get adapters, or all-linear; by default what peft knows for the architecture"},
    )


@dataclass(frozen=True)
class DataArguments:
    """Where the rows come from, and how a row becomes a prompt (and, for supervised training, a completion)."""

    dataset: str = field(
        default="",
        metadata={"help": "a .json, .jsonl, .parquet or .csv file, a save_to_disk folder, or a hub name (required)"},
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "name of the hub data set's configuration (a local file has none)"}
    )
    dataset_split: str | None = field(
        default=None, metadata={"help": "split to train on, or a slice as in train[:1000]; by default train"}
    )
    eval_dataset: str | None = field(
        default=None, metadata={"help": "data set to evaluate on; --dataset when only --eval_split is given"}
    )
    eval_split: str | None = field(
        default=None, metadata={"help": "split to evaluate on, or a slice as in test[:64]; needed for a hub name"}
    )
    prompt_column: str = field(default="prompt", metadata={"help": "column that holds the prompt"})
    completion_column: str = field(default="completion", metadata={"help": "column that holds the completion (sft)"})
    conversational: bool = field(
        default=False, metadata={"help": "wrap a prompt that is a string in a chat: one message of the user"}
    )
    system_prompt: str | None = field(default=None, metadata={"help": "message of the system that opens every chat"})


@dataclass(frozen=True)
class RewardArguments:
    """What judges the completions."""

    reward: list[str] | None = field(
        default=None,
        metadata={
            "help": "path/to/file.py:function, package.module.function or a reward model; several get --reward_weights"
        },
    )


@dataclass(frozen=True)
class RunArguments:
    """What to do with all of it."""

    dry_run: bool = field(
        default=False,
        metadata={"help": "resolve model, data, arguments and micro-batches, print them, and do not train"},
    )

"""Trainers of tiny models on sums of digits: one factory for all tests that run one in their own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    TrainerCallback,
)

import lowpeak
from preference_data import tiny_classifier
from tiny_models import char_tokenizer, tiny_model

TOKENIZER = char_tokenizer()
PARTS = (
    *("reward_funcs", "peft_config", "eval_dataset", "rollout_func", "callbacks", "optimizers", "ref_model", "judge"),
    *("value_model", "reward_model", "reward_processing_classes", "compute_metrics", "preprocess_logits_for_metrics"),
    *("formatting_func", "quantization_config", "optimizer_cls_and_kwargs", "compute_loss_func", "data_collator"),
    *("tools", "environment_factory", "teacher_model"),
)
ONLINE_KINDS = ("GRPO", "RLOO", "PPO", "OnlineDPO", "Distillation")
KINDS = (*ONLINE_KINDS, "SFT", "Reward", "DPO", "KTO")
COMMON = {
    "per_device_train_batch_size": 8,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "micro_batch_tokens": 512,
}
ONLINE = {"max_completion_length": 5, "logprob_chunk_size": 64}
GROUPS = {"GRPO": 4, "RLOO": 4, "OnlineDPO": 4}
SAVED = {"save_strategy": "steps", "save_steps": 1}
LAYOUTS = {"shared": {"share_prompt": True}, "rows": {"share_prompt": False}, "padded": {"padding_free": False}}
SGD = {"optim": "sgd", "learning_rate": 0.1}  # AdamW makes whole steps of gradients that are rounding alone


def rows(count: int = 16) -> Dataset:
    """Prompts of two digits and a sign, each with the digit that it asks for."""
    prompts = [f"{i % 10}{i * 7 % 10}=" for i in range(count)]
    return Dataset.from_list([{"prompt": prompt, "answer": prompt[0]} for prompt in prompts])


def supervised_rows(count: int = 8) -> Dataset:
    """Sums with completions of one to three tokens."""
    return Dataset.from_list([{"prompt": f"{i % 10}=", "completion": str(i % 10) * (1 + i % 3)} for i in range(count)])


def pair_rows(count: int = 8) -> Dataset:
    """Questions with a chosen and a rejected answer."""
    return Dataset.from_list(
        [{"prompt": f"{i % 10}=", "chosen": str(i % 10), "rejected": str((i + 3) % 10)} for i in range(count)]
    )


def labelled_rows(count: int = 8) -> Dataset:
    """Questions with an answer, of which two of three are desirable."""
    return Dataset.from_list(
        [{"prompt": f"{i % 10}=", "completion": str(i % 10), "label": i % 3 > 0} for i in range(count)]
    )


DATA = {"SFT": supervised_rows, "Reward": pair_rows, "DPO": pair_rows, "KTO": labelled_rows}


def ones(completions: list[str], **columns: Any) -> list[float]:
    """How often each completion has a 1."""
    return [float(text.count("1")) for text in completions]


def spread(completions: list[str], **columns: Any) -> list[float]:
    """A number from each completion that seldom is another's."""
    return [sum(ord(letter) * (i + 1) for i, letter in enumerate(text)) % 7 / 7 for text in completions]


def digits(completions: list[str], **columns: Any) -> list[float]:
    """The sum of each completion's digits."""
    return [sum(int(letter) for letter in text if letter.isdigit()) / 9 for text in completions]


class StopAfter(TrainerCallback):
    """Ends a run early."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.steps


def saved(folder: Path, model: Any, tokenizer: Any = TOKENIZER) -> str:
    """A folder with this model and its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def granite() -> GraniteForCausalLM:
    """A model of a family without a sequence classifier in transformers."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = GraniteConfig(vocab_size=13, intermediate_size=64, max_position_embeddings=128, pad_token_id=0, **sizes)
    return GraniteForCausalLM(config)


def refused_model(vocab_size: int = 13) -> MistralForCausalLM:
    """A model that packed rows and the decode loop refuse, for a setting that its family does not read."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=vocab_size, intermediate_size=64, sliding_window=6, attn_temperature_tuning=True, **sizes, **ends
        )
    )  # fmt: skip


def make(
    kind: str, folder: Path | str, model: Any = None, data: Any = ..., tokenizer: Any = None, **changes: Any
) -> Any:
    """A trainer of `kind`; `changes` are arguments of its config, or of its constructor where they are in PARTS.

    `tokenizer=False` passes none.
    """
    online = kind not in DATA
    parts = {name: changes.pop(name) for name in PARTS if name in changes}
    if kind == "Distillation":
        parts.setdefault("teacher_model", tiny_model(seed=1))
    elif online:
        parts.setdefault("reward_funcs", ones)
    groups = {"num_generations": GROUPS[kind]} if kind in GROUPS else {}
    settings = {**COMMON, **(ONLINE if online else {}), **groups, **changes}
    return getattr(lowpeak, f"{kind}Trainer")(
        model=(tiny_classifier() if kind == "Reward" else tiny_model()) if model is None else model,
        args=getattr(lowpeak, f"{kind}Config")(**{"output_dir": str(folder), **settings}),
        train_dataset=DATA.get(kind, rows)() if data is ... else data,
        processing_class=TOKENIZER if tokenizer is None else tokenizer or None,
        **parts,
    )


def trained(*args: Any, resume: Path | bool | None = None, **changes: Any) -> Any:
    """A trainer of `make` that has trained, from the start or from the checkpoint `resume`."""
    run = make(*args, **changes)
    run.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
    return run


def weights(run: Any) -> dict[str, Any]:
    """A copy of the model's weights."""
    return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


def column(run: Any, name: str) -> list[Any]:
    """What the log has of one metric, step by step."""
    return [row[name] for row in run.state.log_history if name in row]


def steps(run: Any) -> list[dict[str, Any]]:
    """The entries of the log that are of steps."""
    return [row for row in run.state.log_history if "loss" in row]


def journal(folder: Path, name: str = "steps") -> list[dict[str, Any]]:
    """The rows of a run's journal."""
    return [json.loads(line) for line in (folder / "journal" / f"{name}.jsonl").read_text().splitlines()]


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two runs' weights are the same bits."""
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


class OutOfMemory:
    """A hook that raises in these forwards of the model, by their numbers."""

    def __init__(self, *at: int) -> None:
        self._at, self._count = at, 0

    def __call__(self, module: Any, inputs: Any) -> None:
        self._count += 1
        if self._count in self._at:
            raise torch.OutOfMemoryError("full")


def kept_records(run: Any) -> list[Any]:
    """The records of each rollout that the trainer collects from now on."""
    kept, collect = [], run.collector.collect

    def keeping(*args: Any, **options: Any) -> Any:
        rollout = collect(*args, **options)
        kept.append(rollout.records)
        return rollout

    run.collector.collect = keeping
    return kept

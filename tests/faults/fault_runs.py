"""Small real runs for the tests of faults: what a run is told, and what it leaves behind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import TrainerCallback

from lowpeak import (
    DistillationConfig,
    DistillationTrainer,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from lowpeak.journal import ROLLOUTS, read_steps
from tiny_models import char_tokenizer, digest, tiny_model, trained_adapter

TRAINERS = {
    "grpo": (GRPOConfig, GRPOTrainer),
    "rloo": (RLOOConfig, RLOOTrainer),
    "distillation": (DistillationConfig, DistillationTrainer),
    "sft": (SFTConfig, SFTTrainer),
}
BASE: dict[str, Any] = {
    "use_cpu": True, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2, "logging_steps": 2, "save_steps": 3,
    "max_steps": 8, "per_device_train_batch_size": 8,
}  # fmt: skip
ONLINE: dict[str, Any] = {"num_generations": 4, "max_completion_length": 5}


@dataclass(frozen=True)
class Case:
    """A run: which trainer with which arguments, and what else it has that a resumed run must take up again."""

    trainer: str = "grpo"
    args: Mapping[str, Any] = field(default_factory=dict)
    num_rows: int = 24
    stream: bool = False
    dropout: float = 0.0
    adapter: str = ""  # "": none; "fresh": by peft_config; "trained": a PeftModel whose adapter has an effect
    rollout_func: bool = False

    def settings(self) -> dict[str, Any]:
        online = {} if self.trainer == "sft" else ONLINE
        return {**BASE, **online, "disable_dropout": not self.dropout, **self.args}


def ones(completions: list[str], **columns: Any) -> list[float]:
    """A point or so for each 1, by Python's global generator: a noisy judge, though sure where there is none."""
    return [text.count("1") * (1.0 + 0.01 * random.random()) for text in completions]


async def short(completions: list[str], **columns: Any) -> list[float | None]:
    """Shorter is better; some rows it does not judge."""
    return [None if text.startswith("7") else -0.1 * len(text) for text in completions]


def generate(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """A user's own generation, which draws from torch's global generator and lets an environment write a token."""
    tokenizer = trainer.processing_class
    ids = [[*torch.randint(2, len(tokenizer), (3,)).tolist(), 5, tokenizer.eos_token_id] for _ in prompts]
    return {
        "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": ids,
        "logprobs": [[-1.5] * len(row) for row in ids],
        "env_mask": [[1, 1, 1, 0, 1] for _ in ids],
        "turns": [len(row) for row in ids],
    }


class At(TrainerCallback):
    """Does something at a hook's call, once `step` steps are done."""

    def __init__(self, hook: str, step: int, act: Callable[[Any], Any]) -> None:
        def call(args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                act(model)

        setattr(self, hook, call)


def build(case: Case, folder: Path) -> Any:
    """The trainer of a case, from nothing, as a script would build it again to resume."""
    config, trainer = TRAINERS[case.trainer]
    tokenizer = char_tokenizer()
    model, adapter = _model(case, len(tokenizer))
    arguments: dict[str, Any] = {
        "model": model,
        "args": config(output_dir=str(folder), **case.settings()),
        "train_dataset": _data(case),
        "processing_class": tokenizer,
        "peft_config": adapter,
    }
    if "eval_strategy" in case.args:
        arguments["eval_dataset"] = Dataset.from_list(_rows(case, 4))
    if case.trainer != "sft":
        arguments["reward_funcs"] = [ones, short]
    if case.rollout_func:
        arguments["rollout_func"] = generate
    return trainer(**arguments)


def _model(case: Case, vocab_size: int) -> tuple[nn.Module, Any]:
    model = tiny_model(vocab_size)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = case.dropout
    if not case.adapter:
        return model, None
    from peft import LoraConfig

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=case.dropout)
    if case.adapter == "fresh":
        return model, config
    return trained_adapter(model, config), None


def _data(case: Case) -> Any:
    rows = _rows(case, case.num_rows)
    return IterableDataset.from_generator(lambda: iter(rows)) if case.stream else Dataset.from_list(rows)


def _rows(case: Case, count: int) -> list[dict[str, str]]:
    prompts = [f"{i % 10}{(i * 7) % 10}=" for i in range(count)]
    columns = {"sft": ["completion"], "distillation": ["completion", "privileged_context"]}.get(case.trainer, [])
    return [{"prompt": prompt, **dict.fromkeys(columns, prompt[:2])} for prompt in prompts]


# what a run leaves behind


def finish(trainer: Any, result: Path) -> None:
    reference = trainer.run.reference
    found = {
        "step": trainer.state.global_step,
        "weights": digest(trainer.model),
        "reference": None if reference is None or reference.model is None else digest(reference.model),
        "best": trainer.state.best_metric,
    }
    result.write_text(json.dumps(found))


def run_alone(case: Case, place: Path) -> None:
    trainer = build(case, place / "run")
    trainer.train()
    finish(trainer, place / "result.json")


def run_resumed(case: Case, place: Path) -> None:
    """The same from the last checkpoint in `place/run`."""
    trainer = build(case, place / "run")
    trainer.train(resume_from_checkpoint=True)
    finish(trainer, place / "result.json")


def run_until_error(case: Case, place: Path, prepare: Callable[[Any], None]) -> None:
    """A run that must fail after `prepare(trainer)` was called: the error's class and words go to `place/error.txt`."""
    trainer = build(case, place / "run")
    prepare(trainer)
    try:
        trainer.train()
    except BaseException as error:
        (place / "error.txt").write_text(f"{type(error).__name__}: {error}")
        return
    raise AssertionError("the run ended well")


def ending(place: Path) -> tuple[Any, ...]:
    """What the run in `place` came to: weights and step, the journal's steps, the journal's rollouts."""
    result = json.loads((place / "result.json").read_text())
    return result, steps(place / "run"), rollouts(place / "run")


def steps(folder: Path) -> list[dict[str, Any]]:
    """The journal's steps without times and memory, which no two runs share."""
    timed = ("time/", "idle/", "push/", "peak_memory/", "step_time", "tokens_per_second")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_steps(folder / "journal")]


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """The journal's completions without the seconds of tools."""
    path = folder / "journal" / f"{ROLLOUTS}.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for turn in (turn for row in found for turn in row.get("turns", ())):
        turn.pop("seconds", None)
    return found


def checkpoints(folder: Path) -> list[str]:
    """The names of all checkpoints in a run's folder, of half ones too."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("checkpoint"))


# A run that saves after 3 and 6 of its 8 steps, evaluates after 5, and makes a rollout for each two steps.
STANDARD = Case(
    args={"num_iterations": 2, "beta": 0.04, "save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 5},
    dropout=0.1,
)

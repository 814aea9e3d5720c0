"""DPO, KTO and distillation beside TRL's trainers on the same weights and rows, in their own process: trl changes transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import lowpeak
from small_runs import saved, steps
from tiny_models import char_tokenizer, tiny_model
from trl_wheel import FOLDER

sys.path.append(str(FOLDER))

import trl

NAMES = ("loss", "grad_norm", "entropy", "num_tokens")
_REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
OF_KIND = {
    "DPO": (*_REWARDS, "rewards/accuracies", "mean_token_accuracy"),
    "KTO": (*_REWARDS, "kl"),
    "Distillation": ("completions/mean_length",),
}
# A small epsilon would turn the rounding of gradients near zero into whole steps.
SETTINGS = {
    "per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "adam_epsilon": 1e-3, "logging_steps": 1,
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False,
}  # fmt: skip


# The likeliest token is always drawn: the libraries' random numbers differ.
GREEDY = {"max_completion_length": 6, "top_k": 1}


def rows_of(kind: str, conversational: bool = False) -> Dataset:
    """Answers of unequal lengths, one of which max_length truncates; TRL's KTO has both labels in each step."""
    rows = []
    for i in range(16):
        prompt, chosen, rejected = (
            f"{i % 10}{i * 7 % 10}=",
            str(i % 10) * (1 + i % 3),
            str((i + 3) % 10) * (1 + i % 2 * 3),
        )
        answers = [chosen * (9 if i == 5 else 1), rejected]
        if conversational:
            prompt = [{"role": "user", "content": prompt}]
            answers = [[{"role": "assistant", "content": answer}] for answer in answers]
        label = i % 3 > 0
        of_kind = {
            "DPO": {"chosen": answers[0], "rejected": answers[1]},
            "KTO": {"completion": answers[not label], "label": label},
            "Distillation": {},
        }
        rows.append({"prompt": prompt, **of_kind[kind]})
    return Dataset.from_list(rows)


def measured(library: Any, kind: str, folder: Path, conversational: bool = False, **changes: Any) -> list[list[float]]:
    """The logged numbers of four steps, rows in order."""
    ours = library is lowpeak
    generates = kind == "Distillation"
    order = {"shuffle_dataset": False} if ours or generates else {"train_sampling_strategy": "sequential"}
    tokenizer = char_tokenizer(chat=True)
    parts = {"teacher_model": saved(folder / "teacher", tiny_model(len(tokenizer), 1), tokenizer)} if generates else {}
    sizes = GREEDY if generates else {"max_length": 24}
    trainer = getattr(library, f"{kind}Trainer")(
        model=saved(folder / "model", tiny_model(len(tokenizer)), tokenizer),
        **parts,
        args=getattr(library, f"{kind}Config")(
            output_dir=str(folder / str(ours)), **SETTINGS, **order, **sizes, **changes
        ),
        train_dataset=rows_of(kind, conversational),
        processing_class=tokenizer,
    )
    trainer.train()
    return [[row[name] for name in (*NAMES, *OF_KIND[kind])] for row in steps(trainer)]


def compare(folder: Path, kind: str, changes: dict[str, Any]) -> None:
    """Losses, gradient norms and metrics agree to six digits."""
    ours, theirs = (measured(library, kind, folder, **changes) for library in (lowpeak, trl))
    assert len(ours) == len(theirs) == 4
    for step, (own, peer) in enumerate(zip(ours, theirs, strict=True)):
        print(step, own, peer)
        assert own == pytest.approx(peer, rel=1e-5, abs=2e-6), step

"""The learning task that both sides train on: noisy sort (examples/noisy_sort.py), its settings and its warm start.

The warm start is a plain loop and neither library's trainer: both sides load the weights that it saves.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.process import ROOT

NUM_PROMPTS = 32  # a step
NUM_GENERATIONS = 8  # of each prompt
NUM_STEPS = 160
WARM_STEPS = 32
WARM_ROWS = 128  # a step, each row seen once
HELD_OUT_SEED = 1_000_000  # one held-out set for all seeds
OF_ALGORITHM: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "dapo", "scale_rewards": "group"},
    "rloo": {"normalize_advantages": False},
    "ppo": {"num_iterations": 2, "value_learning_rate": 1e-2, "vf_coef": 0.5},
}
IGNORED = -100  # transformers' label of a token without loss


def load_example(name: str) -> ModuleType:
    """A file of examples/, which is not a package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        assert spec is not None, "the examples stand beside the benchmarks"
        assert spec.loader is not None, "a file has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


noisy_sort = load_example("noisy_sort")


def warm_start(folder: Path, seed: int, steps: int = WARM_STEPS) -> None:
    """Save a model that was taught too little, mostly wrong answers: AdamW 1e-3, betas 0.9 and 0.98, no decay.

    After the default number of steps about one sampled answer in twenty is right; more steps leave less to learn.
    """
    tokenizer, model = noisy_sort.make_tokenizer(), noisy_sort.make_model(seed)
    demonstrations = noisy_sort.make_demonstrations(steps * WARM_ROWS, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for start in range(0, len(demonstrations), WARM_ROWS):
        rows = demonstrations[start : start + WARM_ROWS]
        inputs_BL, labels_BL = encode(tokenizer, rows["prompt"], rows["completion"])
        loss = model(input_ids=inputs_BL, labels=labels_BL).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def encode(tokenizer: Any, prompts: Sequence[str], completions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token ids [B, L] of equally long rows with the end of the sequence, and labels [B, L] on completions alone."""
    prompts_BP = torch.tensor(tokenizer(list(prompts))["input_ids"])
    completions_BC = torch.tensor(tokenizer(list(completions))["input_ids"])
    ends_B1 = torch.full((len(completions_BC), 1), tokenizer.eos_token_id)
    inputs_BL = torch.cat([prompts_BP, completions_BC, ends_B1], dim=1)
    labels_BL = inputs_BL.clone()
    labels_BL[:, : prompts_BP.shape[1]] = IGNORED
    return inputs_BL, labels_BL


def train_judge(start: Path, folder: Path, seed: int, steps: int, rows: int = 64) -> None:
    """A reward model of the task, trained on hard preferences from the weights of `start`, centred, saved into `folder`."""
    from lowpeak import RewardConfig, RewardTrainer

    args = RewardConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=rows,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        center_rewards_coefficient=0.01,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    trainer = RewardTrainer(str(start), args, train_dataset=noisy_sort.make_preferences(steps * rows, seed, hard=True))
    trainer.train()
    trainer.save_model()


def trainer_settings(algorithm: str, seed: int, steps: int, output_dir: Path) -> dict[str, Any]:
    """The arguments of either library's trainer: names and meanings are the same in both."""
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "max_steps": steps,
        "per_device_train_batch_size": NUM_PROMPTS * NUM_GENERATIONS,
        "gradient_accumulation_steps": 1,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": noisy_sort.MAX_COMPLETION_LENGTH,
        "temperature": 1.0,
        "learning_rate": 5e-4,
        "warmup_steps": min(10, steps // 2),
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "num_iterations": 1,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
    }
    return settings | OF_ALGORITHM[algorithm]

"""Small GRPO runs with a real vLLM: the same arguments in a test's process and on several ranks."""

from __future__ import annotations

import os
import string
from typing import Any

import torch
from datasets import Dataset

from lowpeak import GRPOConfig, GRPOTrainer
from tiny_models import char_tokenizer, tiny_model

# More tokens than the 64 that vLLM gives each of two workers at least: both have some.
TOKENIZER = char_tokenizer("0123456789=" + string.ascii_letters + string.punctuation.replace("=", ""))
DATA = Dataset.from_list([{"prompt": f"{i}{i * 7 % 10}="} for i in range(10)])


def small_model(context: int = 512) -> Any:
    """Heads 32 wide, which vLLM's attention wants on CPUs, and logits of a trained model's size."""
    model = tiny_model(len(TOKENIZER), hidden=128, context=context)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.3)
    return model


def spread(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A number from the tokens, so that rewards differ within a group."""
    return [float(sum(ids) % 5) for ids in completion_ids]


def grpo_arguments(folder: Any, **changes: Any) -> GRPOConfig:
    return GRPOConfig(**arguments_in(folder, **changes))


def arguments_in(folder: Any, **changes: Any) -> dict[str, Any]:
    """8 completions of 2 prompts a rollout, whatever the number of ranks."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    base = {
        "output_dir": str(folder), "per_device_train_batch_size": 8 // world_size, "num_generations": 4,
        "max_completion_length": 6, "max_steps": 3, "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # with 1e-8, where a gradient is nearly zero its last bit would become a whole step
        "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "use_vllm": True,
    }  # fmt: skip
    return {**base, **changes}


def grpo_trainer(args: GRPOConfig, model: Any = None, reward: Any = spread, **more: Any) -> GRPOTrainer:
    return GRPOTrainer(model or small_model(), reward, args, DATA, DATA, TOKENIZER, **more)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {}
    for piece in trainer.run.strategy.slices(trainer.model_wrapped, 1 << 20, None):
        found.setdefault(piece.name, []).append(piece.values.clone())
    return {name: torch.cat(parts) for name, parts in found.items()}


def steps_of(trainer: Any) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "loss" in row]

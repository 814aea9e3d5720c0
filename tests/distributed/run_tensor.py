"""Trains under tensor parallelism, or in one process: `run_tensor.py TENSOR DATA OUT WHAT...`.

What: `cases` are those of `CASES`, and one that goes on from its own middle; sizes (2x1) are whose checkpoint to go on from.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from run_numbers import weights_of
from setups import build, forget, spread, tensor_parallel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tiny import char_tokenizer

# Models and settings, of which each lies on the ranks in its own way, or changes what they must agree on.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "grpo": ("GRPO", "tied", {"num_iterations": 2, "max_steps": 4}),
    "rloo": ("RLOO", "qwen3", {"beta": 0.0, "num_generations": 4, "micro_batch_tokens": 24}),
    "frozen": (
        "GRPO",
        "untied",
        {"beta": 0.1, "max_steps": 5, "sync_ref_model": True, "ref_model_sync_steps": 2, "gather_budget": "0"},
    ),
    "ppo": ("PPO", "tied", {"num_iterations": 2, "max_steps": 4, "vf_coef": 0.5}),
    "online_dpo": ("OnlineDPO", "untied", {"max_steps": 4, "micro_batch_tokens": 48}),
    "sft": ("SFT", "tied", {}),
}


def saved_model(kind: str, folder: Path) -> str:
    """A model in a folder: tied or not, with biases, or with norms of single heads, whose gradients peers have in parts."""
    torch.manual_seed(0)
    tokenizer = char_tokenizer("0123456789=+-*")
    sizes = {
        "vocab_size": 16,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": kind == "tied",
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    model = (
        Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8))
        if kind == "qwen3"
        else Qwen2ForCausalLM(Qwen2Config(**sizes))
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# A checkpoint after step 3 is in the middle of a rollout, which serves steps 3 and 4.
SAVED: dict[str, Any] = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 3,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "weight_decay": 0.1,
}


def spread_once(completions: list[str], **columns: Any) -> list[float]:
    """`spread`, which is asked on one of the devices that tensors are cut over."""
    assert int(os.environ.get("RANK", "0")) % int(sys.argv[1]) == 0
    return spread(completions, **columns)


def run_of(name: str, algorithm: str, arguments: dict[str, Any], model: str, resumed: Path | None = None) -> None:
    """Train, or go on, and keep what came out."""
    tensor, data, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    own = {key: value for key, value in arguments.items() if key != "gather_budget" or data > 1}
    place = tensor_parallel(tensor, data)
    each = {"per_device_train_batch_size": 8 // data, **place, **own}
    rewards = {} if algorithm == "SFT" else {"rewards": spread_once}
    trainer = build(algorithm, out / f"{tensor}x{data}" / name, each, str(out / model), **rewards)
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    result = {
        "weights": weights_of(trainer),
        "steps": {row["step"]: (row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row},
        "strategy": type(trainer.run.strategy).__name__,
    }
    if trainer.is_world_process_zero():
        torch.save(result, out / f"{tensor}x{data}-{name}.pt")
    forget()


def main() -> None:
    """All that was asked for, in one process group."""
    tensor, data, out, sources = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    if sources[0] == "cases":
        if tensor == 1:
            for kind in ("tied", "untied", "qwen3"):
                saved_model(kind, out / kind)
        for name, (algorithm, kind, arguments) in CASES.items():
            run_of(name, algorithm, arguments, kind)
        run_of("saved", "GRPO", SAVED, "tied")
        sources[0] = f"{tensor}x{data}"
    for source in sources:
        run_of(f"from-{source}", "GRPO", SAVED, "tied", out / source / "saved" / "checkpoint-3")


if __name__ == "__main__":
    main()

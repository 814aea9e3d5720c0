"""Online DPO with a judge, or with `--reward` by a reward. Run `make quickstart MODEL=tiny` first: it makes what this reads."""

from __future__ import annotations

import sys

from datasets import load_dataset
from noisy_sort import sorted_exactly
from noisy_sort_judge import judge

from lowpeak import OnlineDPOConfig, OnlineDPOTrainer


def main(by_reward: bool) -> None:
    """Train the quickstart's warm-started model on pairs of its own answers."""
    data = load_dataset("json", data_files={"train": "runs/quickstart/prompts.jsonl"})
    args = OnlineDPOConfig(
        output_dir="runs/online_dpo",
        max_steps=160,
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=7,
        learning_rate=5e-4,
        warmup_steps=10,
        beta=0.1,
        log_completions=True,
        num_completions_to_print=4,
    )
    trainer = OnlineDPOTrainer(
        model="runs/quickstart/warm_start",
        args=args,
        train_dataset=data["train"],
        **({"reward_funcs": sorted_exactly} if by_reward else {"judge": judge}),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(by_reward="--reward" in sys.argv[1:])

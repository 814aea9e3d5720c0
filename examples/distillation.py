"""Distillation as a TRL user writes it, with the import changed.

Run `make quickstart ALGORITHM=distillation` first: it makes the model, its teacher and the prompts.
"""

from __future__ import annotations

from datasets import load_dataset
from noisy_sort import sorted_exactly

from lowpeak import DistillationConfig, DistillationTrainer


def main() -> None:
    """Train the quickstart's warm-started model; the reward is measured and trains nothing."""
    files = {"train": "runs/quickstart/prompts.jsonl", "test": "runs/quickstart/held_out.jsonl"}
    data = load_dataset("json", data_files=files)
    args = DistillationConfig(
        output_dir="runs/distillation",
        max_steps=60,
        per_device_train_batch_size=128,
        max_completion_length=7,
        learning_rate=5e-4,
        warmup_steps=10,
        beta=1.0,
        eval_strategy="steps",
        eval_steps=30,
    )
    trainer = DistillationTrainer(
        model="runs/quickstart/warm_start",
        teacher_model="runs/quickstart/distillation/teacher",
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        reward_funcs=sorted_exactly,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

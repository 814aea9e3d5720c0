"""RLOO as a TRL user writes it, with the import changed. Run `make quickstart MODEL=tiny` first: it makes what this reads."""

from __future__ import annotations

from datasets import load_dataset
from noisy_sort import sorted_exactly

from lowpeak import RLOOConfig, RLOOTrainer


def main() -> None:
    """Train the quickstart's warm-started model."""
    files = {"train": "runs/quickstart/prompts.jsonl", "test": "runs/quickstart/held_out.jsonl"}
    data = load_dataset("json", data_files=files)
    args = RLOOConfig(
        output_dir="runs/rloo",
        max_steps=160,
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=7,
        learning_rate=5e-4,
        warmup_steps=10,
        beta=0.0,
        eval_strategy="steps",
        eval_steps=40,
        log_completions=True,
        num_completions_to_print=4,
    )
    trainer = RLOOTrainer(
        model="runs/quickstart/warm_start",
        reward_funcs=sorted_exactly,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

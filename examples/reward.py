"""A reward model in Python, from preferences. Run `make quickstart MODEL=tiny` first: it makes model and data."""

from __future__ import annotations

from datasets import load_dataset

from lowpeak import RewardConfig, RewardTrainer


def main() -> None:
    """Start from the quickstart's warm-started model, whose head becomes a score; `reward_funcs="runs/reward"` judges with it."""
    trainer = RewardTrainer(
        model="runs/quickstart/warm_start",
        args=RewardConfig(output_dir="runs/reward", max_steps=120, per_device_train_batch_size=64, learning_rate=2e-3),
        train_dataset=load_dataset("json", data_files="runs/quickstart/preferences.jsonl", split="train"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

"""Supervised training in Python, on demonstrations. Run `make quickstart MODEL=tiny` first: it makes model and data."""

from __future__ import annotations

from datasets import load_dataset

from lowpeak import SFTConfig, SFTTrainer


def main() -> None:
    """Train the quickstart's warm-started model a little longer on its demonstrations."""
    trainer = SFTTrainer(
        model="runs/quickstart/warm_start",
        args=SFTConfig(output_dir="runs/sft", max_steps=50, per_device_train_batch_size=128, learning_rate=1e-3),
        train_dataset=load_dataset("json", data_files="runs/quickstart/demonstrations.jsonl", split="train"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

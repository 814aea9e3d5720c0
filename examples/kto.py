"""KTO in Python, on answers with a label. Run `make quickstart MODEL=tiny` first: it makes model and data."""

from __future__ import annotations

from datasets import load_dataset

from lowpeak import KTOConfig, KTOTrainer


def main() -> None:
    """Train the quickstart's warm-started model; each of its pairs becomes an answer labelled true and one labelled false."""
    args = KTOConfig(
        output_dir="runs/kto",
        max_steps=150,
        per_device_train_batch_size=128,
        learning_rate=1e-3,
        warmup_steps=10,
        beta=0.5,
    )
    trainer = KTOTrainer(
        model="runs/quickstart/warm_start",
        args=args,
        train_dataset=load_dataset("json", data_files="runs/quickstart/preferences.jsonl", split="train"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

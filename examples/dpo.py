"""DPO in Python, on pairs of answers. Run `make quickstart MODEL=tiny` first: it makes model and data."""

from __future__ import annotations

from datasets import load_dataset

from lowpeak import DPOConfig, DPOTrainer


def main() -> None:
    """Train the quickstart's warm-started model on pairs: its likelihood of the chosen answers rises by the added "sft" loss."""
    args = DPOConfig(
        output_dir="runs/dpo",
        max_steps=100,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        warmup_steps=10,
        beta=0.5,
        loss_type=["sigmoid", "sft"],
    )
    trainer = DPOTrainer(
        model="runs/quickstart/warm_start",
        args=args,
        train_dataset=load_dataset("json", data_files="runs/quickstart/preferences.jsonl", split="train"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

"""PPO with a value head on the policy's backbone. Run `make quickstart MODEL=tiny` first: it makes what this reads."""

from __future__ import annotations

from datasets import load_dataset
from noisy_sort import sorted_exactly

from lowpeak import PPOConfig, PPOTrainer


def main() -> None:
    """Train the quickstart's warm-started model and its critic."""
    files = {"train": "runs/quickstart/prompts.jsonl", "test": "runs/quickstart/held_out.jsonl"}
    data = load_dataset("json", data_files=files)
    args = PPOConfig(
        output_dir="runs/ppo",
        max_steps=160,
        per_device_train_batch_size=256,
        num_generations=8,
        num_iterations=2,
        max_completion_length=7,
        learning_rate=5e-4,
        value_learning_rate=1e-2,
        vf_coef=0.5,
        cliprange_value=None,
        warmup_steps=10,
        beta=0.0,
        eval_strategy="steps",
        eval_steps=40,
        log_completions=True,
        num_completions_to_print=4,
    )
    trainer = PPOTrainer(
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

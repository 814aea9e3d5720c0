"""A reward model learns to tell sorted digits from nearly sorted ones, and GRPO then learns from it."""

from __future__ import annotations

import torch
from benchmarks.harness.task import noisy_sort
from transformers import Qwen2ForSequenceClassification

from lowpeak import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

QUIET = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "weight_decay": 0.0}


def test_a_trained_reward_model_ranks_held_out_pairs_and_grpo_climbs_it(tmp_path):
    tokenizer, config = noisy_sort.make_tokenizer(), noisy_sort.make_model(0).config
    torch.manual_seed(0)
    config.num_labels = 1
    args = RewardConfig(
        output_dir=str(tmp_path),
        max_steps=120,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        warmup_steps=10,
        gradient_checkpointing=False,
        **QUIET,
    )
    trainer = RewardTrainer(
        Qwen2ForSequenceClassification(config),
        args,
        train_dataset=noisy_sort.make_preferences(120 * 64, seed=1),
        eval_dataset=noisy_sort.make_preferences(256, seed=2, held_out=True),
        processing_class=tokenizer,
    )
    assert 0.3 < trainer.evaluate()["eval_accuracy"] < 0.7
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.9
    trainer.save_model(str(tmp_path / "judge"))
    judged = rewards_of_grpo(tmp_path, tokenizer)
    assert sum(judged[-10:]) / 10 > sum(judged[:5]) / 5 + 1  # three standard errors; steps of 64 rows differ by 0.6


def rewards_of_grpo(tmp_path, tokenizer):
    """The judge's mean reward of each of a few steps, of a policy that starts knowing nothing."""
    args = GRPOConfig(
        output_dir=str(tmp_path / "grpo"),
        max_steps=40,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=noisy_sort.MAX_COMPLETION_LENGTH,
        learning_rate=1e-3,
        logging_steps=1,
        gradient_checkpointing=False,
        **QUIET,
    )
    online = GRPOTrainer(
        model=noisy_sort.make_model(0),
        reward_funcs=str(tmp_path / "judge"),
        args=args,
        train_dataset=noisy_sort.make_prompts(320, seed=0),
        processing_class=tokenizer,
    )
    online.train()
    return [row["reward"] for row in online.state.log_history if "reward" in row]

"""A reward model learns to tell sorted digits from nearly sorted ones."""

from __future__ import annotations

import torch
from benchmarks.harness.task import noisy_sort
from transformers import Qwen2ForSequenceClassification

from lowpeak import RewardConfig, RewardTrainer

QUIET = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "weight_decay": 0.0}


def test_a_trained_reward_model_ranks_held_out_pairs(tmp_path):
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

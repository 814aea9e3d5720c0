"""A policy teaches itself to answer without the hint that its teacher reads."""

from __future__ import annotations

import random

import pytest
from benchmarks.harness.task import noisy_sort
from datasets import Dataset, concatenate_datasets

from lowpeak import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer

pytestmark = pytest.mark.release
HINTS, WRONG, STEPS, ROWS = 96, 0.93, 30, 128
SHARED = {
    "use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "weight_decay": 0.0,
    "gradient_checkpointing": False, "per_device_train_batch_size": ROWS, "seed": 0,
}  # fmt: skip


def hinted_start(folder):
    """A model that copies a hint before its prompt, and that sorts badly without one."""
    draw = random.Random(0)
    prompts = noisy_sort.draw_prompts(HINTS * ROWS, 51)
    hints = ["".join(draw.choices("0123456789", k=noisy_sort.NUM_DIGITS)) for _ in prompts]
    pairs = zip(hints, prompts, strict=True)
    copies = Dataset.from_dict({"prompt": [f"{hint}={prompt}" for hint, prompt in pairs], "completion": hints})
    rows = concatenate_datasets([noisy_sort.make_demonstrations(32 * ROWS, 0, WRONG), copies]).shuffle(seed=0)
    args = SFTConfig(str(folder), learning_rate=1e-3, adam_beta2=0.98, max_steps=32 + HINTS, **SHARED)
    trainer = SFTTrainer(
        noisy_sort.make_model(0), args, train_dataset=rows, processing_class=noisy_sort.make_tokenizer()
    )
    trainer.train()
    return trainer.model


def with_hints(rows):
    return rows.add_column("privileged_context", rows["answer"])


def test_self_distillation_without_a_teacher_doubles_sampled_accuracy(tmp_path):
    held_out = with_hints(noisy_sort.make_prompts(512, 0, held_out=True))
    args = DistillationConfig(
        str(tmp_path / "run"), teacher_model_kind="base", teacher_prompt_template="{privileged_context}={prompt}",
        max_completion_length=noisy_sort.MAX_COMPLETION_LENGTH, learning_rate=5e-4, warmup_steps=10, max_steps=STEPS, **SHARED,
    )  # fmt: skip
    trainer = DistillationTrainer(
        hinted_start(tmp_path / "start"),
        args=args,
        train_dataset=with_hints(noisy_sort.make_prompts(STEPS * ROWS, 0)),
        eval_dataset=held_out,
        processing_class=noisy_sort.make_tokenizer(),
        reward_funcs=noisy_sort.sorted_exactly,
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 2 * before > 0

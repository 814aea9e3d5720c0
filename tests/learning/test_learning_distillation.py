"""A policy teaches itself to answer without the hint that its teacher reads."""

from __future__ import annotations

import pytest
from benchmarks.distillation_curves import ITSELF, ROWS, SHARED, hinted_start, with_hints
from benchmarks.harness.task import noisy_sort

from lowpeak import DistillationConfig, DistillationTrainer

pytestmark = pytest.mark.release
STEPS = 30


def test_self_distillation_without_a_teacher_triples_sampled_accuracy(tmp_path):
    held_out = with_hints(noisy_sort.make_prompts(512, 0, held_out=True))
    args = DistillationConfig(
        str(tmp_path / "run"), max_completion_length=noisy_sort.MAX_COMPLETION_LENGTH, warmup_steps=10,
        max_steps=STEPS, **ITSELF, **SHARED,
    )  # fmt: skip
    trainer = DistillationTrainer(
        hinted_start(tmp_path / "start", 0),
        args=args,
        train_dataset=with_hints(noisy_sort.make_prompts(STEPS * ROWS, 0)),
        eval_dataset=held_out,
        processing_class=noisy_sort.make_tokenizer(),
        reward_funcs=noisy_sort.sorted_exactly,
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 3 * before > 0

"""The task of the tests of learning: noisy sort with a digit less, from a start that is wrong in most of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.accuracy import measure
from benchmarks.harness.task import HELD_OUT_SEED, noisy_sort, warm_start
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, GENERATIONS, NUM_DIGITS, WARM_STEPS = 32, 8, 5, 28


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("start")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noisy_sort, "NUM_DIGITS", NUM_DIGITS)
        patch.setattr(noisy_sort, "MAX_COMPLETION_LENGTH", NUM_DIGITS + 1)
        warm_start(folder, 0, WARM_STEPS)
        yield folder


@pytest.fixture
def learn(tmp_path, start) -> Callable[..., None]:
    """Train by `trainer(model, prompts, tokenizer, arguments)` and hold what was learned to three standard errors."""

    def run(make: Callable[..., Any], steps: int) -> None:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
        before = accuracy(model, tokenizer)
        shared = {
            "output_dir": str(tmp_path),
            "max_steps": steps,
            "per_device_train_batch_size": PROMPTS * GENERATIONS,
            "num_generations": GENERATIONS,
            "max_completion_length": noisy_sort.MAX_COMPLETION_LENGTH,
            "warmup_steps": 10,
            "weight_decay": 0.0,
            "gradient_checkpointing": False,
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
            "seed": 0,
        }
        make(
            model, shared, train_dataset=noisy_sort.make_prompts(steps * PROMPTS, 0), processing_class=tokenizer
        ).train()
        after = accuracy(model, tokenizer)
        print(f"{before} -> {after}")
        assert before["sampled"] < 0.1
        assert after["sampled"] > before["sampled"] + 0.12

    return run


def accuracy(model: Any, tokenizer: Any) -> dict[str, float]:
    """Shares of right answers to held-out prompts, greedy and sampled."""
    prompts = noisy_sort.draw_prompts(512, HELD_OUT_SEED, held_out=True)
    return measure(model.eval(), tokenizer, prompts, [noisy_sort.answer_to(prompt) for prompt in prompts])

"""The task of the tests of learning: noisy sort, where it can be with a digit less, from a start mostly wrong in its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.accuracy import measure
from benchmarks.harness.task import HELD_OUT_SEED, noisy_sort, warm_start
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, GENERATIONS = 32, 8
TASK = (5, 28)  # digits, and steps of the supervised start; a file may have another


@pytest.fixture(scope="module")
def start(request, tmp_path_factory) -> Iterator[Path]:
    num_digits, warm_steps = getattr(request.module, "TASK", TASK)
    folder = tmp_path_factory.mktemp("start")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noisy_sort, "NUM_DIGITS", num_digits)
        patch.setattr(noisy_sort, "MAX_COMPLETION_LENGTH", num_digits + 1)
        warm_start(folder, 0, warm_steps)
        yield folder


@pytest.fixture
def learn(tmp_path, start) -> Callable[..., None]:
    """Train what `make` makes of a model and arguments for so many steps; what is learned is three standard errors or more."""

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

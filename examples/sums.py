"""Sums in English for a small chat model: "What is 7 + 12?". The reward is 1 if the answer's last number is right, else 0."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

HELD_OUT = 64
LARGEST = 20
STEPS = 50
PROMPTS = 4  # a step
LEARNING_RATE = 1e-5
MAX_COMPLETION_LENGTH = 24


def make_prompts(seed: int) -> Dataset:
    """Questions to train on in chat form, each with its answer, in an order of this seed."""
    rows = _shuffled()[HELD_OUT:]
    random.Random(seed).shuffle(rows)
    return Dataset.from_list(rows)


def make_held_out() -> Dataset:
    """Questions that are never trained on, the same for every seed; "12 + 7" may be held out where "7 + 12" is not."""
    return Dataset.from_list(_shuffled()[:HELD_OUT])


def _shuffled() -> list[dict[str, Any]]:
    """All sums of two numbers from 1 to LARGEST."""
    numbers = range(1, LARGEST + 1)
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
        for a in numbers
        for b in numbers
    ]
    random.Random(0).shuffle(rows)
    return rows


def last_number_is_right(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """The reward: 1 if the last number of the answer is the sum, else 0."""
    found = [re.findall(r"\d+", completion[0]["content"])[-1:] for completion in completions]
    return [float(numbers == [right]) for numbers, right in zip(found, answer, strict=True)]

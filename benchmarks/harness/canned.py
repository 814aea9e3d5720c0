"""Completions that are fixed for each prompt, in place of sampled ones: what follows must then be the same in both.

Some are right, most have two neighbours swapped, some stop early and some do not end: every kind that a loss meets.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.task import NUM_GENERATIONS, noisy_sort


def canned_ids(tokenizer: Any, prompt: str, number: int) -> list[int]:
    """Token ids of the prompt's completion `number`."""
    draw = random.Random(zlib.crc32(prompt.encode()) * NUM_GENERATIONS + number)
    digits = list(noisy_sort.answer_to(prompt))
    if draw.random() < 0.6:
        left = draw.randrange(len(digits) - 1)
        digits[left], digits[left + 1] = digits[left + 1], digits[left]
    ids = tokenizer("".join(digits))["input_ids"]
    kind = draw.random()
    if kind < 0.15:
        return [*ids, ids[-1]]  # cut off by its length
    return [*(ids[:4] if kind < 0.3 else ids), tokenizer.eos_token_id]


def our_rollouts(prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
    """lowpeak's `rollout_func`: each prompt comes once per completion."""
    tokenizer = trainer.processing_class
    rows = [canned_ids(tokenizer, prompt, i % NUM_GENERATIONS) for i, prompt in enumerate(prompts)]
    return {
        "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": rows,
        "logprobs": [None] * len(rows),
    }


def can_peer(trainer: Any, algorithm: str) -> None:
    """Make TRL's trainer take the same completions where it would generate; each prompt comes once per completion."""
    tokenizer = trainer.processing_class

    def generate(prompt_ids: Sequence[Sequence[int]], *more: Any, **options: Any) -> Any:
        seen: Counter[str] = Counter()
        completions = []
        for ids in prompt_ids:
            prompt = tokenizer.decode(ids)
            completions.append(canned_ids(tokenizer, prompt, seen[prompt]))
            seen[prompt] += 1
        return completions if algorithm == "rloo" else (completions, None)

    trainer._generate_single_turn = generate

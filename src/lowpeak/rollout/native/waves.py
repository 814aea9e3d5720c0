"""Forming waves for `generate()`: which rows go together, so that their keys and values fit the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lowpeak.errors import EngineError


class Row(NamedTuple):
    """One row of a wave: which prompt of the call, and which completion of its group."""

    prompt: int
    completion: int


Wave = list[Row]


def form_waves(lengths: Sequence[int], num_generations: int, max_new_tokens: int, max_tokens: int) -> list[Wave]:
    """Waves of rows with `rows x (longest prompt + max_new_tokens) <= max_tokens`, longest prompts first.

    Prompts of like lengths share a wave, so that little is padded. A group stays whole (its prompt is forwarded once)
    unless a wave holds fewer rows than a group has. EngineError when not even one row fits.
    """
    waves: list[Wave] = []
    room = 0
    for prompt in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        completion = 0
        while completion < num_generations:
            rest = num_generations - completion
            capacity = max_tokens // (lengths[prompt] + max_new_tokens)
            if room < min(rest, capacity) or room == 0:
                check_capacity(capacity, lengths[prompt], max_new_tokens, max_tokens)
                waves.append([])
                room = capacity
            taken = min(rest, room)
            waves[-1] += [Row(prompt, i) for i in range(completion, completion + taken)]
            completion += taken
            room -= taken
    return waves


def check_capacity(capacity: int, length: int, max_new_tokens: int, max_tokens: int) -> None:
    """EngineError where a budget of `max_tokens` has no room for one row."""
    if capacity < 1:
        raise EngineError(
            f"One row of {length} prompt and {max_new_tokens} new tokens does not fit the rollout's KV cache of "
            f"{max_tokens} tokens: raise kv_cache_bytes or generate fewer tokens."
        )

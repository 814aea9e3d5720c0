"""Which rows generate together so that their keys and values fit the budget: by slots of the cache, or in waves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from lowpeak.errors import EngineError


class SequenceId(NamedTuple):
    """One row of a wave: which prompt of the call, and which completion of its group."""

    prompt: int
    completion: int


Wave = list[SequenceId]


class PromptQueue:
    """The prompts of a call that have not begun, longest first: `slots x (longest prompt + new) <= max_tokens`.

    Prompts of like lengths are in the batch together, and the number of slots grows as prompts get shorter. EngineError
    when not even one row fits.
    """

    def __init__(self, lengths: Sequence[int], num_generations: int, max_new_tokens: int, max_tokens: int) -> None:
        self.lengths = lengths
        self._max_new_tokens = max_new_tokens
        self._num_generations = num_generations
        self._prompts = deque(sorted(range(len(lengths)), key=lambda i: -lengths[i]))
        self.set_budget(max_tokens)

    def set_budget(self, max_tokens: int) -> None:
        """Hold at most so many tokens from now on."""
        self.max_tokens = max_tokens
        if self.lengths:
            longest, new = max(self.lengths), self._max_new_tokens
            check_capacity(max_tokens // (longest + new), longest, new, max_tokens)

    def num_slots(self, live: Sequence[int]) -> int:
        """Slots that the budget holds while rows of the prompts `live` and the next one that waits are in them."""
        prompts = (*live, *list(self._prompts)[:1])
        longest = max((self.lengths[prompt] for prompt in prompts), default=0)
        return self.max_tokens // (longest + self._max_new_tokens)

    @property
    def num_rows(self) -> int:
        return len(self._prompts) * self._num_generations

    def take(self, num_rows: int) -> list[int]:
        """The prompts that begin when `num_rows` rows may: as few as have so many; the last may have more."""
        num_prompts = min(len(self._prompts), -(-max(0, num_rows) // self._num_generations))
        return [self._prompts.popleft() for _ in range(num_prompts)]


def form_waves(lengths: Sequence[int], num_generations: int, max_new_tokens: int, max_tokens: int) -> list[Wave]:
    """Waves of rows with `rows x (longest prompt + max_new_tokens) <= max_tokens`, longest prompts first.

    Prompts of like lengths share a wave, so that little is padded. EngineError when not even one row fits.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rows = [SequenceId(prompt, completion) for prompt in longest_first for completion in range(num_generations)]
    waves: list[Wave] = []
    while rows:
        longest = lengths[rows[0].prompt]
        capacity = max_tokens // (longest + max_new_tokens)
        check_capacity(capacity, longest, max_new_tokens, max_tokens)
        waves.append(rows[:capacity])
        rows = rows[capacity:]
    return waves


def check_capacity(capacity: int, length: int, max_new_tokens: int, max_tokens: int) -> None:
    """EngineError where a budget of `max_tokens` has no room for one row."""
    if capacity < 1:
        raise EngineError(
            f"One row of {length} prompt and {max_new_tokens} new tokens does not fit the rollout's KV cache of "
            f"{max_tokens} tokens: raise kv_cache_bytes or generate fewer tokens."
        )

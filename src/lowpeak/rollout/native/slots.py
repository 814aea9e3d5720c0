"""Slots: how many rows the KV-cache budget holds at once, and which prompts begin when some are free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lowpeak.rollout.native.waves import check_capacity


class Waiting:
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
        """Rows of the prompts that wait."""
        return len(self._prompts) * self._num_generations

    def take(self, num_rows: int) -> list[int]:
        """The prompts that begin when `num_rows` rows may: as few as have so many; the last may have more."""
        num_prompts = min(len(self._prompts), -(-max(0, num_rows) // self._num_generations))
        return [self._prompts.popleft() for _ in range(num_prompts)]

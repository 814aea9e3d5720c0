"""Slots: how many rows the KV-cache budget holds at once, and which waiting rows enter those that are free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lowpeak.rollout.native.waves import Row, Wave, check_capacity

REFILL_ONE_IN = 4  # waiting rows enter when one slot in so many is free


class Waiting:
    """The rows of a call that have not begun, longest prompts first: `slots x (longest prompt + new) <= max_tokens`.

    Prompts of like lengths are in the batch together, and the number of slots grows as prompts get shorter. EngineError
    when not even one row fits.
    """

    def __init__(self, lengths: Sequence[int], num_generations: int, max_new_tokens: int, max_tokens: int) -> None:
        self.lengths = lengths
        self.max_tokens = max_tokens
        self._max_new_tokens = max_new_tokens
        self._num_generations = num_generations
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        self._rows = deque(Row(prompt, i) for prompt in order for i in range(num_generations))
        if order:
            longest = lengths[order[0]]
            check_capacity(max_tokens // (longest + max_new_tokens), longest, max_new_tokens, max_tokens)

    def enter(self, live: Sequence[int]) -> Wave:
        """Take the rows that enter beside rows of the prompts `live` (one entry a row); none while few slots are free.

        A group stays whole (its prompt is forwarded once) where it fits into half of the slots.
        """
        if not self._rows:
            return []
        longest = max(self.lengths[prompt] for prompt in (*live, self._rows[0].prompt))
        num_slots = self.max_tokens // (longest + self._max_new_tokens)
        free = num_slots - len(live)
        if free < 1 or free * REFILL_ONE_IN < num_slots:
            return []
        entering: Wave = []
        while self._rows and (part := self._part(free, num_slots)):
            entering += [self._rows.popleft() for _ in range(part)]
            free -= part
        return entering

    def _part(self, free: int, num_slots: int) -> int:
        """How many rows of the next group enter `free` slots."""
        rest = self._num_generations - self._rows[0].completion
        return min(rest, free) if rest <= free or 2 * rest > num_slots else 0

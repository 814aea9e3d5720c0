"""Scheduling of sequences within the KV-cache budget: by slots of the cache, or in waves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lowpeak.arguments import Sampling
from lowpeak.errors import EngineError
from lowpeak.records import Prompt
from lowpeak.rollout.turns import Key


class SequenceId(NamedTuple):
    """Prompt index within the call, and completion index within the group."""

    prompt: int
    completion: int


Wave = list[SequenceId]


def sequence_keys(sequences: Sequence[SequenceId], prompts: Sequence[Prompt], sampling: Sampling) -> list[Key]:
    """Return the keys of the sequences' random numbers: prompt's serial and completion's number."""
    first = sampling.first_completion
    return [(prompts[prompt].serial, first + completion) for prompt, completion in sequences]


class PromptQueue:
    """Prompts of a call that have not started, longest first, and the slots for them.

    `slots_of(n)` is the number of slots of n tokens. Prompts of similar lengths run together, and the number of slots grows as
    prompts get shorter. Raise EngineError if not even one sequence fits.
    """

    def __init__(
        self, lengths: Sequence[int], num_generations: int, max_new_tokens: int, slots_of: Callable[[int], int]
    ) -> None:
        self.lengths = lengths
        self._max_new_tokens = max_new_tokens
        self._num_generations = num_generations
        self._prompts = deque(sorted(range(len(lengths)), key=lambda i: -lengths[i]))
        self.limit_slots(slots_of)

    def limit_slots(self, slots_of: Callable[[int], int]) -> None:
        """Have so many slots from now on."""
        self._slots_of = slots_of
        if self.lengths:
            longest, new = max(self.lengths), self._max_new_tokens
            check_capacity(slots_of(longest + new), longest, new)

    def num_slots(self, live: Sequence[int]) -> int:
        """Return the slots that the budget allows with the `live` prompts and the next waiting one."""
        return self._slots_of(self.slot_columns(live))

    def slot_columns(self, live: Sequence[int]) -> int:
        """Return the most columns of the sequences of the `live` prompts and of the next waiting one."""
        prompts = (*live, *list(self._prompts)[:1])
        return max((self.lengths[prompt] for prompt in prompts), default=0) + self._max_new_tokens

    @property
    def num_rows(self) -> int:
        return len(self._prompts) * self._num_generations

    def take(self, num_rows: int) -> list[int]:
        """Remove and return the prompts to start for `num_rows` free slots.

        The last prompt may have more sequences than the remaining slots.
        """
        num_prompts = min(len(self._prompts), -(-max(0, num_rows) // self._num_generations))
        return [self._prompts.popleft() for _ in range(num_prompts)]


def form_waves(
    lengths: Sequence[int], num_generations: int, max_new_tokens: int, max_tokens: int, *, equal_lengths: bool = False
) -> list[Wave]:
    """Return waves with `sequences x (longest prompt + max_new_tokens) <= max_tokens`, longest prompts first.

    Prompts of similar lengths share a wave, which reduces padding; with `equal_lengths` only prompts of one length do. Raise
    EngineError if not even one sequence fits.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    sequences = [SequenceId(prompt, completion) for prompt in longest_first for completion in range(num_generations)]
    waves: list[Wave] = []
    while sequences:
        longest = lengths[sequences[0].prompt]
        capacity = max_tokens // (longest + max_new_tokens)
        check_capacity(capacity, longest, max_new_tokens, max_tokens)
        if equal_lengths:
            capacity = min(capacity, sum(lengths[sequence.prompt] == longest for sequence in sequences))
        waves.append(sequences[:capacity])
        sequences = sequences[capacity:]
    return waves


def check_capacity(capacity: int, length: int, max_new_tokens: int, max_tokens: int | None = None) -> None:
    """Raise EngineError if a KV cache, of `max_tokens` or of other bytes, has no room for one sequence."""
    if capacity < 1:
        size = "" if max_tokens is None else f" of {max_tokens} tokens"
        raise EngineError(
            f"One sequence of {length} prompt and {max_new_tokens} new tokens does not fit the rollout's KV cache{size}: "
            "raise kv_cache_bytes or generate fewer tokens."
        )

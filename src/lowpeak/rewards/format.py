"""Rewards for a form, 1 or 0 by a regular expression, and for length in tokens, of which none is above 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowpeak.errors import ArgumentError
from lowpeak.rewards.answers import text_of

# Each part refuses the marks around it, so that a second one does not match and matching takes linear time.
_THINK_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"
_HASH_ANSWER = r"(?:(?!####).)*^#### ?[-−]?\$?[\d,]*\.?\d+"


class FormatReward:
    """`float(re.fullmatch(pattern, completion.strip()))`, with `.` matching newlines and `^`, `$` each line's ends."""

    def __init__(self, pattern: str, name: str = "format_reward") -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL | re.MULTILINE)
        except re.error as error:
            raise ArgumentError(f"The format {pattern!r} is no regular expression: {error}.") from error
        self.__name__ = name

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(self._pattern.fullmatch(text_of(completion).strip()) is not None) for completion in completions]


format_reward = FormatReward
think_answer_format = format_reward(_THINK_ANSWER, "think_answer_format")
hash_answer_format = format_reward(_HASH_ANSWER, "hash_answer_format")


@dataclass(frozen=True)
class SoftOverlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), for a completion of L tokens.

    0 up to `max_length - cache`, then `(max_length - cache - L) / cache`, and -1 beyond `max_length`.
    """

    __name__ = "soft_overlong"
    max_length: int
    cache: int

    def __post_init__(self) -> None:
        if not 0 <= self.cache <= self.max_length:
            raise ArgumentError(
                f"soft_overlong's cache must be from 0 to max_length {self.max_length}, not {self.cache}."
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._punish(len(ids)) for ids in completion_ids]

    def _punish(self, length: int) -> float:
        if length > self.max_length:
            return -1.0
        return min(0.0, (self.max_length - self.cache - length) / self.cache) if self.cache else 0.0


@dataclass(frozen=True)
class LinearLength:
    """`-per_token * max(0, L - free)` for a completion of L tokens."""

    __name__ = "length_penalty"
    per_token: float = 0.001
    free: int = 0

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [-self.per_token * max(0, len(ids) - self.free) for ids in completion_ids]


length_penalty = LinearLength()

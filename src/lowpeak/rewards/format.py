"""Rewards for a form: 1 where the whole completion matches a regular expression, 0 elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lowpeak.errors import ArgumentError
from lowpeak.rewards.messages import text_of

# Each part refuses the marks around it, so that a second one does not match and matching takes linear time.
_THINK_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"
_HASH_ANSWER = r"(?:(?!####).)*^#### ?[-−]?\$?[\d,]*\.?\d+"


class FormatReward:
    """`float(re.fullmatch(pattern, completion.strip()))`, with `.` matching newlines and `^`, `$` each line's ends."""

    def __init__(self, pattern: str, name: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL | re.MULTILINE)
        except re.error as error:
            raise ArgumentError(f"The format {pattern!r} is no regular expression: {error}.") from error
        self.__name__ = name

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        """1 or 0 per completion."""
        return [float(self._pattern.fullmatch(text_of(completion).strip()) is not None) for completion in completions]


def format_reward(pattern: str, name: str = "format_reward") -> FormatReward:
    """A reward of 1 for completions that match `pattern` from end to end, white space around them aside."""
    return FormatReward(pattern, name)


think_answer_format = format_reward(_THINK_ANSWER, "think_answer_format")
hash_answer_format = format_reward(_HASH_ANSWER, "hash_answer_format")

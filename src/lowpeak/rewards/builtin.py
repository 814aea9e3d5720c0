r"""Built-in rewards: final answers as text or number, regular expressions, and lengths in tokens.

The answer rewards compare with the column `answer` or `solution`. A final answer stands after the text's last mark:
`#### 72` (GSM8K), `\boxed{72}`, `<answer>72</answer>`. In a text without marks it is the last line for `exact_match` and
the last number for `numeric_match`. The column may contain a full solution that ends in such a mark. A completion whose
column contains no answer gets None.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from lowpeak.errors import ArgumentError, RewardError

_MARK = re.compile(r"####|\\boxed\s*\{|<answer>")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_AMOUNT = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus after a digit, a letter or a closing bracket is an operator; one before a space may be a list's bullet.
_NUMBER = re.compile(
    r"(?P<minus>(?<![\w)\]}])[-−])?(?:\\?[$€£]\s?)?(?P<minus_2>(?<=[$€£])[-−])?"
    rf"(?P<amount>{_AMOUNT})(?:\s?/\s?(?P<divisor>{_AMOUNT}))?"
)
# The limit of a number's or a box's characters: Python refuses integers of 4300 digits, and unclosed boxes take time.
_MAX_CHARACTERS = 1000

# Each part excludes the marks around it, so a repeated mark does not match and matching takes linear time.
_THINK_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"
_HASH_ANSWER = r"(?:(?!####).)*^#### ?[-−]?\$?[\d,]*\.?\d+"


def completion_text(completion: Any) -> str:
    """Return a completion's text: the string, or the content of the last message."""
    if isinstance(completion, str):
        return completion
    # After calls of tools, the last message is the one with the final answer.
    content = completion[-1].get("content") if completion else ""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def exact_match(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, solution: Sequence[Any] | None = None, **_: Any
) -> list[float | None]:
    """Return 1 for each final answer that equals the column's as text, else 0.

    Any run of white space counts as one space.
    """
    return _compare_answers("exact_match", completions, solution if answer is None else answer, final_answer)


def numeric_match(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, solution: Sequence[Any] | None = None, **_: Any
) -> list[float | None]:
    """Return 1 for each final number that equals the column's exactly, else 0.

    The notation does not matter: 72, 72.00, $72 and 72% are equal.
    """
    return _compare_answers("numeric_match", completions, solution if answer is None else answer, final_number)


def final_answer(text: str) -> str:
    """Return the text at the last mark, else the last line that is not blank.

    If all lines are blank, the answer is empty.
    """
    answer = _marked_answer(text)
    if answer is None:
        answer = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    return " ".join(answer.split())


def final_number(text: str) -> Fraction | None:
    r"""Return the last number at the last mark, or of the text if it has no mark.

    Thousands' commas, currency signs and percent signs are removed (50% is 50, as in GSM8K); `3/4` and
    `\frac{3}{4}` are three quarters.
    """
    answer = _marked_answer(text)
    last = deque(_NUMBER.finditer(_plain_numbers(text if answer is None else answer)), maxlen=1)
    return _to_fraction(last[0]) if last else None


def _compare_answers(
    name: str,
    completions: Sequence[Any],
    answers: Sequence[Any] | None,
    extract: Callable[[str], Fraction | str | None],
) -> list[float | None]:
    if answers is None:
        raise RewardError(
            f"Reward '{name}' needs a column 'answer' or 'solution', which the dataset does not have: rename a column, or "
            "use another reward."
        )
    rewards: list[float | None] = []
    for completion, answer in zip(completions, answers, strict=True):
        # Write floats without an exponent, which `final_number` does not read.
        text = format(Decimal(str(answer)), "f") if isinstance(answer, float) else str(answer)
        expected = None if answer is None else extract(text)
        rewards.append(None if expected in (None, "") else float(extract(completion_text(completion)) == expected))
    return rewards


def _marked_answer(text: str) -> str | None:
    """Return the text at the last mark, ignoring boxes that are never closed."""
    for mark in reversed(list(_MARK.finditer(text))):
        rest = text[mark.end() :]
        if mark.group() == "####":
            return rest.strip().partition("\n")[0]
        if mark.group() == "<answer>":
            # The closing tag may be missing: </answer> may be a stop string.
            return rest.partition("</answer>")[0]
        boxed = _braced_text(rest[:_MAX_CHARACTERS])
        if boxed is not None:
            return boxed
    return None


def _braced_text(text: str) -> str | None:
    """Return the text up to the brace that closes one opened before the text, if any."""
    depth = 1
    if "}" not in text:
        return None
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position]
    return None


def _plain_numbers(text: str) -> str:
    """Return the text with LaTeX numbers in plain notation."""
    text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", "")
    return _FRACTION.sub(r"\1/\2", text)


def _to_fraction(number: re.Match[str]) -> Fraction | None:
    parts = [part.replace(",", "") for part in (number["amount"], number["divisor"]) if part]
    if any(len(part) > _MAX_CHARACTERS for part in parts):
        return None
    amount, divisor = Fraction(parts[0]), Fraction(parts[1]) if len(parts) > 1 else Fraction(1)
    if divisor == 0:
        return None
    return (-amount if number["minus"] or number["minus_2"] else amount) / divisor


class FormatReward:
    """A reward of 1 for completions that match a regular expression, else 0.

    It is `float(re.fullmatch(pattern, completion.strip()))`; `.` matches newlines, `^` and `$` match at each line.
    """

    def __init__(self, pattern: str, name: str = "format_reward") -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL | re.MULTILINE)
        except re.error as error:
            raise ArgumentError(
                f"The format {pattern!r} is not a regular expression: {error}; correct or escape it."
            ) from error
        self.__name__ = name

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        return [
            float(self._pattern.fullmatch(completion_text(completion).strip()) is not None)
            for completion in completions
        ]


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
                f"soft_overlong's cache must be from 0 to max_length {self.max_length}, got {self.cache}."
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._punish(len(ids)) for ids in completion_ids]

    def _punish(self, length: int) -> float:
        if length > self.max_length:
            return -1.0
        return min(0.0, (self.max_length - self.cache - length) / self.cache) if self.cache else 0.0


@dataclass(frozen=True)
class LinearLength:
    """A penalty of `-per_token * max(0, L - free)` for a completion of L tokens."""

    __name__ = "length_penalty"
    per_token: float = 0.001
    free: int = 0

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [-self.per_token * max(0, len(ids) - self.free) for ids in completion_ids]


length_penalty = LinearLength()

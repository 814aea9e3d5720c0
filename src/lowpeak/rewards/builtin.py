r"""Built-in rewards: final answers as text, number or formula, regular expressions, lengths and repetitions in tokens.

The answer rewards compare with the column `answer` or `solution`. A final answer stands after the text's last mark:
`#### 72` (GSM8K), `\boxed{72}`, `<answer>72</answer>`. In a text without marks it is the last line for `exact_match` and
the last number for `numeric_match`. The column may contain a full solution that ends in such a mark. A completion whose
column contains no answer gets None. `accuracy_reward`, `think_format_reward` and the `get_` functions have TRL's names.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from lowpeak.errors import ArgumentError, RewardError, require_package

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


def think_format_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 for each completion that begins with its only `<think>` and has a `</think>` after it, else 0."""
    texts = [completion_text(completion) for completion in completions]
    return [
        float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text[len("<think>") :])
        for text in texts
    ]


class SoftOverlongPunishment(SoftOverlong):
    """`SoftOverlong` under TRL's name in the metrics."""

    __name__ = "soft_overlong_punishment_reward"


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlong:
    """Return `SoftOverlong(max_completion_len, soft_punish_cache)`, with TRL's names."""
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


# What TRL's command line means by the bare name get_soft_overlong_punishment.
soft_overlong_punishment = SoftOverlongPunishment(1280, 256)


@dataclass(frozen=True)
class RepetitionPenalty:
    """A penalty of `max_penalty * (1 - u / n)` for a completion with u different ones among its n n-grams of token ids.

    It is 0 for completions of fewer than `ngram_size` tokens (arXiv 2502.03373, appendix C.2).
    """

    __name__ = "repetition_penalty_reward"
    ngram_size: int = 3
    max_penalty: float = -1.0

    def __post_init__(self) -> None:
        if self.ngram_size < 1 or self.max_penalty > 0:
            raise ArgumentError(
                f"A repetition penalty needs ngram_size of at least 1 and max_penalty of at most 0, got {self.ngram_size} and "
                f"{self.max_penalty}."
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        total = len(ids) - self.ngram_size + 1
        unique = len({tuple(ids[start : start + self.ngram_size]) for start in range(total)})
        return self.max_penalty * (1 - unique / total) if 0 < unique < total else 0.0


get_repetition_penalty_reward = RepetitionPenalty


def accuracy_reward(completions: Sequence[Any], solution: Sequence[Any], **_: Any) -> list[float | None]:
    """Return 1 for each completion whose LaTeX answer math-verify finds equal to the solution, else 0.

    None for a solution that does not parse. Needs the package math-verify.
    """
    require_package("math_verify", "accuracy_reward", "math", named="math-verify")
    return [
        _verify_formula(completion_text(completion), str(expected))
        for completion, expected in zip(completions, solution, strict=True)
    ]


def reasoning_accuracy_reward(
    completions: Sequence[Any], solution: Sequence[Any], reasoning_delimiters: Sequence[str] = ("</think>",), **_: Any
) -> list[float | None]:
    """Return `accuracy_reward` of the text after the last delimiter; 0 for a completion without one.

    The first of `reasoning_delimiters` that a completion contains ends its reasoning.
    """
    require_package("math_verify", "reasoning_accuracy_reward", "math", named="math-verify")
    rewards: list[float | None] = []
    for completion, expected in zip(completions, solution, strict=True):
        text = completion_text(completion)
        delimiter = next((each for each in reasoning_delimiters if each in text), None)
        rewards.append(0.0 if delimiter is None else _verify_formula(text.rpartition(delimiter)[2], str(expected)))
    return rewards


def _verify_formula(text: str, solution: str) -> float | None:
    """Return whether the first LaTeX answer in the text, boxed ones before others, equals the solution; None if that has none."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # math-verify stops itself by SIGALRM, which only the main thread can receive; reward_timeout bounds the other threads.
    is_main = threading.current_thread() is threading.main_thread()
    parse_seconds, verify_seconds = (10, 5) if is_main else (None, None)
    for name in ("math_verify.parser", "math_verify.grader"):  # they warn at each call without a time limit
        logging.getLogger(name).setLevel(logging.ERROR)
    expected = parse(solution, parsing_timeout=parse_seconds)
    if not expected:
        return None
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    answer = parse(text, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=parse_seconds)
    return float(verify(expected, answer, timeout_seconds=verify_seconds))


@dataclass(frozen=True)
class CosineScaledReward:
    """An accuracy reward scaled by a completion's length L: `b + (a - b) / 2 * (1 + cos(pi * min(L / max_len, 1)))`.

    a is the reward of the shortest and b that of the longest completions: 1 and 0.5 for a right answer by default, -1 and -0.5
    for a wrong one (arXiv 2502.03373, appendix C.1). Answers are right by `accuracy_reward`; None stays None.
    """

    __name__ = "cosine_scaled_reward"
    max_len: int
    min_value_wrong: float = -1.0
    max_value_wrong: float = -0.5
    min_value_correct: float = 0.5
    max_value_correct: float = 1.0

    def __post_init__(self) -> None:
        if self.max_len < 1:
            raise ArgumentError(f"A cosine reward needs max_len of at least 1 token, got {self.max_len}.")

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float | None]:
        right = accuracy_reward(completions, solution)
        return [
            None if is_right is None else self._scale(bool(is_right), len(ids))
            for is_right, ids in zip(right, completion_ids, strict=True)
        ]

    def _scale(self, is_right: bool, length: int) -> float:
        right, wrong = (self.max_value_correct, self.min_value_correct), (self.min_value_wrong, self.max_value_wrong)
        shortest, longest = right if is_right else wrong
        return longest + (shortest - longest) / 2 * (1 + math.cos(math.pi * min(length / self.max_len, 1)))


get_cosine_scaled_reward = CosineScaledReward

r"""Rewards for a final answer: equal as text, or equal as a number. Both take the column `answer` or `solution`.

A final answer is what the last of these marks holds: `#### 72` (GSM8K), `\boxed{72}`, `<answer>72</answer>`; in a text
without marks it is the last line for `exact_match`, the last number for `numeric_match`. The column may hold a whole
solution that ends in such a mark. A row whose column holds no answer is not judged (None).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from lowpeak.errors import RewardError

_MARK = re.compile(r"####|\\boxed\s*\{|<answer>")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_AMOUNT = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus after a digit, a letter or a closing bracket is an operator, and one before a space may be a list's bullet.
_NUMBER = re.compile(
    r"(?P<minus>(?<![\w)\]}])[-−])?(?:\\?[$€£]\s?)?(?P<minus_2>(?<=[$€£])[-−])?"
    rf"(?P<amount>{_AMOUNT})(?:\s?/\s?(?P<divisor>{_AMOUNT}))?"
)
_MAX_LENGTH = 1000  # of a number or a box: Python refuses integers of 4300 digits, and unclosed boxes cost time


def text_of(completion: Any) -> str:
    """Return the completion's text: a string as it is, of a list of messages the last one's content.

    The last one, because with tools in between it is the message that has the final answer.
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def exact_match(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, solution: Sequence[Any] | None = None, **_: Any
) -> list[float | None]:
    """Give 1 where the final answers are equal as text, runs of white space counting as one space; 0 elsewhere."""
    return _compare("exact_match", completions, solution if answer is None else answer, final_answer)


def numeric_match(
    completions: Sequence[Any], answer: Sequence[Any] | None = None, solution: Sequence[Any] | None = None, **_: Any
) -> list[float | None]:
    """Give 1 where the final numbers are equal, exactly and however they are written: 72, 72.00, $72, 72%; 0 elsewhere."""
    return _compare("numeric_match", completions, solution if answer is None else answer, final_number)


def final_answer(text: str) -> str:
    """Return what the last mark holds, else the last line that is not blank; "" where there is none."""
    marked = _marked(text)
    if marked is None:
        marked = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    return " ".join(marked.split())


def final_number(text: str) -> Fraction | None:
    r"""Return the last number that the last mark holds, else the text's last number; None where there is none.

    Thousands' commas, currency signs and percent signs are taken off (50% is 50, as in GSM8K); `3/4` and
    `\frac{3}{4}` are three quarters.
    """
    marked = _marked(text)
    found = deque(_NUMBER.finditer(_plain(text if marked is None else marked)), maxlen=1)
    return _value(found[0]) if found else None


def _compare(
    name: str,
    completions: Sequence[Any],
    truths: Sequence[Any] | None,
    read: Callable[[str], Fraction | str | None],
) -> list[float | None]:
    if truths is None:
        raise RewardError(
            f"Reward '{name}' asks for a column 'answer' or 'solution', which the data set does not have."
        )
    rewards: list[float | None] = []
    for completion, truth in zip(completions, truths, strict=True):
        # A float is written without an exponent.
        spelled = format(Decimal(str(truth)), "f") if isinstance(truth, float) else str(truth)
        wanted = None if truth is None else read(spelled)
        rewards.append(None if wanted in (None, "") else float(read(text_of(completion)) == wanted))
    return rewards


def _marked(text: str) -> str | None:
    """Return what the last mark holds, a box that was cut off aside; None without one."""
    for mark in reversed(list(_MARK.finditer(text))):
        rest = text[mark.end() :]
        if mark.group() == "####":
            return rest.strip().partition("\n")[0]
        if mark.group() == "<answer>":  # need not be closed: </answer> may be a stop string
            return rest.partition("</answer>")[0]
        held = _braced(rest[:_MAX_LENGTH])
        if held is not None:
            return held
    return None


def _braced(text: str) -> str | None:
    """Return the text up to the brace that closes one opened before it; None when it was cut off."""
    depth = 1
    if "}" not in text:
        return None
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position]
    return None


def _plain(text: str) -> str:
    """Write LaTeX's numbers as plain ones."""
    text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", "")
    return _FRACTION.sub(r"\1/\2", text)


def _value(number: re.Match[str]) -> Fraction | None:
    parts = [part.replace(",", "") for part in (number["amount"], number["divisor"]) if part]
    if any(len(part) > _MAX_LENGTH for part in parts):
        return None
    amount, divisor = Fraction(parts[0]), Fraction(parts[1]) if len(parts) > 1 else Fraction(1)
    if divisor == 0:
        return None
    return (-amount if number["minus"] or number["minus_2"] else amount) / divisor

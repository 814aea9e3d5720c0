"""What rewards are called with, groups laid out as rows in TRL's contract; and what came of a call: values, or a failure."""

from __future__ import annotations

import concurrent.futures
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from lowpeak.errors import RewardError
from lowpeak.records import Completion, Group, Metric, Prompt, merge_metrics

NONE = float("nan")  # what None is in records
_CALLERS = (Path(__file__).parent, Path(concurrent.futures.__file__).parent)
# Advantages are fp32, and so are sums, differences and squares of rewards.
MOST = math.sqrt(torch.finfo(torch.float32).max)
# The contract's own words: a column of this name is never passed on.
_NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})


@dataclass(frozen=True)
class Rows:
    """N rows: row n is completion `places[n][1]` of group `places[n][0]`."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    texts: tuple[str, ...]
    places: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.texts)

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of one call: new lists each time, so that a function that sorts or pops harms no other."""
        return {
            **{name: list(values) for name, values in self.columns.items()},
            "prompts": list(self.prompts),
            "completions": list(self.completions),
            "completion_ids": [list(ids) for ids in self.completion_ids],
        }

    def describe(self, row: int) -> str:
        """Return which row an error is about."""
        group, completion = self.places[row]
        return f"row {row} (completion {completion} of group {group}: {_shown(self.texts[row])})"


def read_rows(groups: Sequence[Group], decode: Callable[[list[int]], str]) -> Rows:
    """Return the rows of whole groups.

    A column has one value per row, the prompt's or, where a `rollout_func` gave one, the completion's; None where a
    row has neither. Prompts are as the data set gave them, completions strings or lists of one message.
    """
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    ids = [completion.ids.tolist() for _, completion in pairs]
    texts = tuple(decode(row) for row in ids)
    return Rows(
        prompts=[prompt.source for prompt, _ in pairs],
        completions=[_as_given(prompt, text) for (prompt, _), text in zip(pairs, texts, strict=True)],
        completion_ids=ids,
        columns=_columns(pairs),
        texts=texts,
        places=tuple((g, k) for g, group in enumerate(groups) for k in range(len(group.completions))),
    )


def _columns(pairs: Sequence[tuple[Prompt, Completion]]) -> dict[str, list[Any]]:
    fields = [{**prompt.columns, **completion.extra} for prompt, completion in pairs]
    names = dict.fromkeys(name for row in fields for name in row if name not in _NOT_COLUMNS)
    return {name: [row.get(name) for row in fields] for name in names}


def _as_given(prompt: Prompt, text: str) -> str | list[dict[str, Any]]:
    """The completion in its prompt's format; what it continues of the prompt is part of it."""
    if isinstance(prompt.source, str):
        return text
    return [{"role": "assistant", "content": prompt.begun + text}]


@dataclass
class RewardLog:
    """What one call logs beside its values; kept only when the call succeeds."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column for the table of completions: one value per row, in one call or in several."""
        self.columns.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; several of one name are averaged."""
        self.metrics = merge_metrics(self.metrics, {name: Metric(float(value))})


@dataclass(frozen=True)
class Outcome:
    """What a call returned, or the error that it raised."""

    returned: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Verdict:
    """One value per row, NaN for None; `failures` has one error for each row that became None by failing.

    A row whose tokens were each given a number has their sum, and them in `tokens`.
    """

    values: tuple[float, ...]
    failures: tuple[RewardError, ...] = ()
    tokens: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    log: RewardLog = field(default_factory=RewardLog)


def check(name: str, outcome: Outcome, log: RewardLog, rows: Rows) -> Verdict:
    """The values of a call; a failure makes None of the rows it concerns: one, or all when the call itself failed."""
    error = outcome.error
    if error is None:
        error = _wrong_shape(name, outcome.returned, len(rows)) or _wrong_log(name, log, len(rows))
    if error is not None:  # without its log: a late call may still be writing it
        return Verdict((NONE,) * len(rows), (_explained(name, error),) * len(rows))
    failures: list[RewardError] = []
    values: list[float] = []
    tokens: dict[int, tuple[float, ...]] = {}
    for row, value in enumerate(_listed(outcome.returned)):
        each = _each_tokens(value)
        if each is None:
            number, fault = _number(value)
        else:
            number, fault = _summed(each, len(rows.completion_ids[row]))
            tokens[row] = tuple(each) if not fault else ()
        values.append(number)
        if fault:
            failures.append(
                RewardError(
                    f"Reward '{name}' returned {fault} for {rows.describe(row)}; "
                    "return a finite number, or None where the reward does not apply (or a list with a number for each token)."
                )
            )
    return Verdict(tuple(values), tuple(failures), tokens, log)


def _each_tokens(value: Any) -> list[Any] | None:
    """The numbers of a row whose tokens have one each; None for a row with one number."""
    if hasattr(value, "tolist") and getattr(value, "ndim", None):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def _summed(each: list[Any], num_tokens: int) -> tuple[float, str]:
    """The sum of the tokens' numbers; and what is wrong with them, if anything."""
    if len(each) != num_tokens:
        return NONE, f"{len(each)} numbers for {num_tokens} tokens (completion_ids has them)"
    numbers = [_number(0.0 if value is None else value) for value in each]
    fault = next((fault for _, fault in numbers if fault), "")
    each[:] = [number for number, _ in numbers]
    return (NONE if fault else sum(each)), fault


def _listed(returned: Any) -> Any:
    """A list of what was returned: lists as they are, tensors and arrays by their `tolist`."""
    return returned.tolist() if hasattr(returned, "tolist") else returned


def _wrong_shape(name: str, returned: Any, num_rows: int) -> RewardError | None:
    values = _listed(returned)
    if not isinstance(values, list | tuple):
        return RewardError(
            f"Reward '{name}' returned {_shown(returned)} of type {type(returned).__name__}; "
            "return a list with one number or None per completion."
        )
    if len(values) != num_rows:
        return RewardError(
            f"Reward '{name}' returned {len(values)} values for {num_rows} completions; return one per completion."
        )
    return None


def _wrong_log(name: str, log: RewardLog, num_rows: int) -> RewardError | None:
    for column, values in log.columns.items():
        if len(values) != num_rows:
            return RewardError(
                f"Reward '{name}' logged {len(values)} values in column '{column}' for {num_rows} completions; "
                "give log_extra one per completion."
            )
    return None


def _number(value: Any) -> tuple[float, str]:
    """The value as a float, NaN for None; and what is wrong with it, if anything."""
    if value is None:
        return NONE, ""
    if not isinstance(value, Real | Decimal) and getattr(value, "ndim", None) == 0:
        value = value.item()  # a scalar of torch or numpy
    if not isinstance(value, Real | Decimal):
        return NONE, f"{_shown(value)} of type {type(value).__name__}"
    try:
        number = float(value)
    except OverflowError:
        return NONE, "a number too large for a float"
    if math.isfinite(number) and abs(number) > MOST:
        return NONE, f"{number}, whose square is infinite in fp32,"
    return (number, "") if math.isfinite(number) else (NONE, str(number))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _explained(name: str, error: BaseException) -> RewardError:
    if isinstance(error, RewardError):
        return error
    said = f": {error}" if str(error) else ""
    explained = RewardError(f"Reward '{name}' raised {type(error).__name__}{said}{_where(error)}.")
    explained.__cause__ = error
    return explained


def _where(error: BaseException) -> str:
    """The last line of the reward's own file that the error passed: not ours, and not a library's that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if Path(frame.filename).parent not in _CALLERS] or frames
    own = [frame for frame in theirs if frame.filename == theirs[0].filename]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""

"""One call of one reward: groups laid out as rows in TRL's contract, what the reward answers, and what is wrong with that."""

from __future__ import annotations

import concurrent.futures
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from lowpeak.errors import RewardError
from lowpeak.records import Group, Metric, merge_metrics
from lowpeak.rewards.function import FunctionReward
from lowpeak.rewards.judge import JudgeReward
from lowpeak.rewards.reward import Reward

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
    row has neither. Prompts are as the data set gave them, completions strings or lists of one message, which has what it
    continues of the prompt, too.
    """
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    ids = [completion.ids.tolist() for _, completion in pairs]
    texts = tuple(decode(row) for row in ids)
    fields = [{**prompt.columns, **completion.extra} for prompt, completion in pairs]
    names = dict.fromkeys(name for row in fields for name in row if name not in _NOT_COLUMNS)
    return Rows(
        prompts=[prompt.source for prompt, _ in pairs],
        completions=[
            text if isinstance(prompt.source, str) else [{"role": "assistant", "content": prompt.begun + text}]
            for (prompt, _), text in zip(pairs, texts, strict=True)
        ],
        completion_ids=ids,
        columns={name: [row.get(name) for row in fields] for name in names},
        texts=texts,
        places=tuple((g, k) for g, group in enumerate(groups) for k in range(len(group.completions))),
    )


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


class RewardCall:
    """What one reward is called with, and its answer once `check` has read it: `values`, one per row, NaN for None.

    `failures` has one error for each row that became None by failing. A row whose tokens were each given a number has their sum,
    and `tokens` has them. A call that was never made has no values.
    """

    def __init__(self, reward: Reward, name: str, rows: Rows, trainer_state: Any) -> None:
        self.reward = reward
        self.name = name
        self.rows = rows
        self.log = RewardLog()
        self.finished = False
        self.error: BaseException | None = None
        self.values: tuple[float, ...] = ()
        self.failures: tuple[RewardError, ...] = ()
        self.tokens: dict[int, tuple[float, ...]] = {}
        self._returned: Any = None
        self._keywords: dict[str, Any] = {
            **rows.keywords(),
            "trainer_state": trainer_state,
            "log_extra": self.log.log_extra,
            "log_metric": self.log.log_metric,
        }
        if isinstance(reward, JudgeReward):  # it compares rows of a group
            self._keywords["groups"] = [group for group, _ in rows.places]

    @property
    def is_async(self) -> bool:
        return isinstance(self.reward, FunctionReward) and self.reward.is_async

    def ask(self) -> None:
        """Call the reward in this thread."""
        try:
            self._returned = self.reward(**self._keywords)
        except (Exception, SystemExit) as error:
            self.error = error
        self.finished = True

    async def ask_async(self) -> None:
        """Await an async reward, among others."""
        assert isinstance(self.reward, FunctionReward)
        try:
            self._returned = await self.reward.call_async(**self._keywords)
        except (Exception, SystemExit) as error:
            self.error = error
        self.finished = True

    def check(self) -> None:
        """Read the answer; a failure makes None of the rows it concerns: one, or all when the call itself failed."""
        error = self.error or self._fault_of_all()
        if error is not None:
            self.log = RewardLog()  # a late call may still be writing the other
            self.values = (NONE,) * len(self.rows)
            self.failures = (_explained(self.name, error),) * len(self.rows)
            return
        values: list[float] = []
        failures: list[RewardError] = []
        for row, value in enumerate(_listed(self._returned)):
            number, self.tokens[row], fault = _read(value, len(self.rows.completion_ids[row]))
            values.append(number)
            if fault:
                failures.append(
                    RewardError(
                        f"Reward '{self.name}' returned {fault} for {self.rows.describe(row)}; return a finite number, or None "
                        "where the reward does not apply (or a list with a number for each token)."
                    )
                )
        self.values, self.failures = tuple(values), tuple(failures)

    def _fault_of_all(self) -> RewardError | None:
        """Return what is wrong with the answer or the log as a whole, if anything."""
        values, num_rows = _listed(self._returned), len(self.rows)
        if not isinstance(values, list | tuple):
            return RewardError(
                f"Reward '{self.name}' returned {_shown(self._returned)} of type {type(self._returned).__name__}; "
                "return a list with one number or None per completion."
            )
        if len(values) != num_rows:
            return RewardError(
                f"Reward '{self.name}' returned {len(values)} values for {num_rows} completions; return one per completion."
            )
        for column, logged in self.log.columns.items():
            if len(logged) != num_rows:
                return RewardError(
                    f"Reward '{self.name}' logged {len(logged)} values in column '{column}' for {num_rows} completions; "
                    "give log_extra one per completion."
                )
        return None


def _listed(returned: Any) -> Any:
    return returned.tolist() if hasattr(returned, "tolist") else returned


def _read(value: Any, num_tokens: int) -> tuple[float, tuple[float, ...], str]:
    """Return a row's number, those of its tokens if each was given one, and what is wrong with them, if anything."""
    if getattr(value, "ndim", None):
        value = _listed(value)
    if not isinstance(value, list | tuple):
        number, fault = _number(value)
        return number, (), fault
    if len(value) != num_tokens:
        return NONE, (), f"{len(value)} numbers for {num_tokens} tokens (completion_ids has them)"
    numbers = [_number(0.0 if each is None else each) for each in value]
    fault = next((fault for _, fault in numbers if fault), "")
    tokens = tuple(number for number, _ in numbers)
    return (NONE, (), fault) if fault else (sum(tokens), tokens, "")


def _number(value: Any) -> tuple[float, str]:
    """Return the value as a float, NaN for None; and what is wrong with it, if anything."""
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
    """Return the last line of the reward's own file that the error passed: not ours, and not a library's that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if Path(frame.filename).parent not in _CALLERS] or frames
    own = [frame for frame in theirs if frame.filename == theirs[0].filename]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""

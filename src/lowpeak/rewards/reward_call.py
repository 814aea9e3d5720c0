"""One call of one reward: its inputs in TRL's contract, its returned values, and their validation."""

from __future__ import annotations

import concurrent.futures
import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from lowpeak.errors import RewardError
from lowpeak.records import Conversation, Metric, merge_metrics
from lowpeak.rewards.function import FunctionReward
from lowpeak.rewards.judge import JudgeReward
from lowpeak.rewards.reward import Reward

NO_REWARD = float("nan")  # a reward's None, in records
# Advantages are fp32, and so are the sums, differences and squares of rewards.
MAX_REWARD = math.sqrt(torch.finfo(torch.float32).max)

# Metrics that no reward may overwrite.
_OWN_METRICS = frozenset(
    {"loss", "grad_norm", "learning_rate", "epoch", "reward", "reward_std", "frac_reward_zero_std", "entropy", "kl"}
    | {"step_time", "num_tokens", "divergence", "teacher_kl", "tokens_per_second"}
)
_OWN_PREFIXES = (
    "rewards/",
    "completions/",
    "time/",
    "peak_memory/",
    "sampling/",
    "clip_ratio/",
    "useful_tokens/",
    "staleness/",
)

# Folders of code that calls rewards; its lines are not named in errors.
_CALLERS = (Path(__file__).parent, Path(concurrent.futures.__file__).parent)


@dataclass(frozen=True)
class RewardInputs:
    """The arguments of rewards for N completions; `positions` has each one's (group, completion) indices.

    `conversations` is empty unless the completions are conversations with tools.
    """

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    texts: tuple[str, ...]
    positions: tuple[tuple[int, int], ...]
    conversations: tuple[Conversation, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of one call."""
        # New lists each time, so that a function that sorts or pops affects no other.
        environments = [each.environment for each in self.conversations]
        return {
            **{name: list(values) for name, values in self.columns.items()},
            **({"conversations": list(self.conversations)} if self.conversations else {}),
            **({"environments": environments} if any(each is not None for each in environments) else {}),
            "prompts": list(self.prompts),
            "completions": list(self.completions),
            "completion_ids": [list(ids) for ids in self.completion_ids],
        }

    def describe(self, index: int) -> str:
        """Return a completion's place and text, for errors."""
        group, completion = self.positions[index]
        return f"index {index} (completion {completion} of group {group}: {_short_repr(self.texts[index])})"


@dataclass
class RewardLog:
    """Columns and metrics that one call logs; dropped if the call fails."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column for the table of completions, one value per completion.

        Several calls append to the same column.
        """
        self.columns.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; several of one name are averaged. ValueError for a name that is no text, or one of lowpeak's."""
        if not isinstance(name, str) or not name or name in _OWN_METRICS or name.startswith(_OWN_PREFIXES):
            raise ValueError(
                f"log_metric({name!r}, ...): the name must be text that lowpeak does not log, as 'mine/score'."
            )
        self.metrics = merge_metrics(self.metrics, {name: Metric(float(value))})


class RewardCall:
    """A call of one reward for all completions, and its validated result.

    `check` sets `values`, one per completion, NaN for None, and `failures`, one error for each completion whose value became
    None by failing. If a reward returns a number for each token, `tokens` has these numbers and the value is their sum. A call
    that was never made has no values.
    """

    def __init__(self, reward: Reward, name: str, inputs: RewardInputs, trainer_state: Any) -> None:
        self.reward = reward
        self.name = name
        self.inputs = inputs
        self.log = RewardLog()
        self.finished = False
        self.error: BaseException | None = None
        self.values: tuple[float, ...] = ()
        self.failures: tuple[RewardError, ...] = ()
        self.tokens: dict[int, tuple[float, ...]] = {}
        self._returned: Any = None
        self._keywords: dict[str, Any] = {
            **inputs.keywords(),
            "trainer_state": trainer_state,
            "log_extra": self.log.log_extra,
            "log_metric": self.log.log_metric,
        }
        if isinstance(reward, JudgeReward):
            # A judge compares the completions of a group.
            self._keywords["groups"] = [group for group, _ in inputs.positions]

    @property
    def is_async(self) -> bool:
        return isinstance(self.reward, FunctionReward) and self.reward.is_async

    def run(self) -> None:
        """Call the reward in this thread."""
        try:
            self._returned = self.reward(**self._keywords)
        except (Exception, SystemExit) as error:
            self.error = error
        self.finished = True

    async def run_async(self) -> None:
        """Await an async reward, concurrently with others."""
        assert isinstance(self.reward, FunctionReward)
        try:
            self._returned = await self.reward.call_async(**self._keywords)
        except (Exception, SystemExit) as error:
            self.error = error
        self.finished = True

    def check(self) -> None:
        """Validate the returned values.

        An invalid value counts as None; if the call failed, all do.
        """
        error = self.error or self._error_of_call()
        if error is not None:
            # A new log, because a call that exceeded its time may still write to the other.
            self.log = RewardLog()
            self.values = (NO_REWARD,) * len(self.inputs)
            self.failures = (_as_reward_error(self.name, error),) * len(self.inputs)
            return
        values: list[float] = []
        failures: list[RewardError] = []
        for index, value in enumerate(_as_list(self._returned)):
            number, self.tokens[index], problem = _read_value(value, len(self.inputs.completion_ids[index]))
            values.append(number)
            if problem:
                failures.append(
                    RewardError(
                        f"Reward '{self.name}' returned {problem} for {self.inputs.describe(index)}; return a finite number, or "
                        "None if the reward does not apply (or a list with a number for each token)."
                    )
                )
        self.values, self.failures = tuple(values), tuple(failures)

    def _error_of_call(self) -> RewardError | None:
        """Return an error if the returned values are not a list, or a number of values is wrong."""
        values, num_completions = _as_list(self._returned), len(self.inputs)
        if not isinstance(values, list | tuple):
            return RewardError(
                f"Reward '{self.name}' returned {_short_repr(self._returned)} of type {type(self._returned).__name__}; "
                "return a list with one number or None per completion."
            )
        if len(values) != num_completions:
            return RewardError(
                f"Reward '{self.name}' returned {len(values)} values for {num_completions} completions; return one per completion."
            )
        for column, logged in self.log.columns.items():
            if len(logged) != num_completions:
                return RewardError(
                    f"Reward '{self.name}' logged {len(logged)} values in column '{column}' for {num_completions} completions; "
                    "give log_extra one per completion."
                )
        return None


def _as_list(returned: Any) -> Any:
    return returned.tolist() if hasattr(returned, "tolist") else returned


def _read_value(value: Any, num_tokens: int) -> tuple[float, tuple[float, ...], str]:
    """Return a completion's reward, the rewards of its tokens, if any, and the problem, if any."""
    if getattr(value, "ndim", None):
        value = _as_list(value)
    if not isinstance(value, list | tuple):
        number, problem = read_number(value)
        return number, (), problem
    if len(value) != num_tokens:
        return NO_REWARD, (), f"{len(value)} numbers for {num_tokens} tokens (see completion_ids)"
    numbers = [read_number(0.0 if each is None else each) for each in value]
    problem = next((problem for _, problem in numbers if problem), "")
    tokens = tuple(number for number, _ in numbers)
    return (NO_REWARD, (), problem) if problem else (sum(tokens), tokens, "")


def read_number(value: Any) -> tuple[float, str]:
    """Return the value as a float, NaN for None, and the problem with it, if any."""
    if value is None:
        return NO_REWARD, ""
    if not isinstance(value, Real | Decimal) and getattr(value, "ndim", None) == 0:
        value = value.item()  # a scalar of torch or numpy
    if not isinstance(value, Real | Decimal):
        return NO_REWARD, f"{_short_repr(value)} of type {type(value).__name__}"
    try:
        number = float(value)
    except OverflowError:
        return NO_REWARD, "a number too large for a float"
    if math.isfinite(number) and abs(number) > MAX_REWARD:
        return NO_REWARD, f"{number}, whose square is infinite in fp32,"
    return (number, "") if math.isfinite(number) else (NO_REWARD, str(number))


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _as_reward_error(name: str, error: BaseException) -> RewardError:
    if isinstance(error, RewardError):
        return error
    message = f": {error}" if str(error) else ""
    first = error.__traceback__
    while first is not None and Path(first.tb_frame.f_code.co_filename).parent in _CALLERS:
        first = first.tb_next
    error = error.with_traceback(first or error.__traceback__)  # it begins with the reward's own frame
    reward_error = RewardError(f"Reward '{name}' raised {type(error).__name__}{message}{_line_of(error)}.")
    reward_error.__cause__ = error
    return reward_error


def _line_of(error: BaseException) -> str:
    """Return the line of the reward's file that raised the error; lines of libraries that it calls are skipped."""
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({in_file[-1].filename}, line {in_file[-1].lineno}: {in_file[-1].line})" if in_file else ""

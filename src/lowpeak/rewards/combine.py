"""Station 5: whole groups in, records with their rewards out. Every reward is asked once per call, for all rows.

TRL's semantics: a row's reward is the weighted sum of what its rewards returned, None left out; a row that nobody
scored has reward NaN, which leaves its group's statistics.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lowpeak.errors import ArgumentError, RewardError, RewardTimeoutError
from lowpeak.ranks import Ranks
from lowpeak.records import Group, Metric, Record, merge_metrics
from lowpeak.rewards.function import FunctionReward
from lowpeak.rewards.judge import JudgeReward
from lowpeak.rewards.judged import Judged
from lowpeak.rewards.make import unique_names
from lowpeak.rewards.model import ModelReward
from lowpeak.rewards.outcome import MOST, NONE, Outcome, RewardLog, Rows, Verdict, check, read_rows
from lowpeak.rewards.reward import Reward
from lowpeak.rewards.waiting import BackgroundLoop, Late

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardSettings:
    """How rewards are weighed, and what a failing one means: an error, or None for the rows it concerns.

    `timeout` bounds each call of a function, in seconds, where the function has no limit of its own.
    """

    weights: tuple[float, ...]
    on_failure: Literal["raise", "none"] = "raise"
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.on_failure not in ("raise", "none"):
            raise ArgumentError(f"A reward's failure can 'raise' or count as 'none', not {self.on_failure!r}.")
        if self.timeout is not None and not self.timeout > 0:
            raise ArgumentError(f"The rewards' time limit must be positive, not {self.timeout} seconds.")
        if not all(math.isfinite(weight) for weight in self.weights):
            raise ArgumentError(f"Reward weights must be finite, not {list(self.weights)}.")


class RewardPanel:
    """All rewards of a run, asked together: sync ones one after another, then all async ones at once.

    Models that are sharded over ranks come last, and are asked on all ranks, also where there are no groups.

    Raises:
        ArgumentError: there is no reward, or not one weight for each.
    """

    def __init__(self, rewards: Sequence[Reward], settings: RewardSettings, decode: Callable[[list[int]], str]) -> None:
        if not rewards:
            raise ArgumentError("There is no reward: pass at least one in `reward_funcs`.")
        if len(settings.weights) != len(rewards):
            raise ArgumentError(
                f"There are {len(settings.weights)} reward weights for {len(rewards)} rewards; give one for each."
            )
        self.names = unique_names([reward.name for reward in rewards])
        self.rewards = tuple(
            _within(reward, name, settings.timeout) for reward, name in zip(rewards, self.names, strict=True)
        )
        self.settings = settings
        self._decode = decode
        self._loop = BackgroundLoop()

    @property
    def asks_together(self) -> bool:
        """Return whether all ranks meet in `judge`, also those without groups."""
        return bool(self._joint())

    def judge(self, groups: Sequence[Group], *, trainer_state: Any = None) -> Judged:
        """Return the groups' rows as records; RewardError if a reward failed and `on_failure` is "raise"."""
        rows = read_rows(groups, self._decode)
        verdicts = self._ask(rows, trainer_state)
        records = self._records(groups, rows, verdicts)
        metrics = reward_metrics(self.names, records)
        for name, verdict in zip(self.names, verdicts, strict=True):
            metrics = merge_metrics(metrics, verdict.log.metrics)
            if self.settings.on_failure == "none":
                metrics[f"rewards/{name}/failed"] = Metric(float(len(verdict.failures)), kind="sum")
        return Judged(records, metrics, self._logged_columns(verdicts), rows.texts, tuple(rows.prompts))

    def _ask(self, rows: Rows, trainer_state: Any) -> list[Verdict]:
        """Return one verdict per reward; without rows there is no call."""
        logs = [RewardLog() for _ in self.rewards]
        keywords = [_keywords(reward, rows, trainer_state, log) for reward, log in zip(self.rewards, logs, strict=True)]
        joint = self._joint()
        verdicts = {index: Verdict(()) for index in range(len(self.rewards))}
        with next(iter(joint.values())).together() if joint else nullcontext():
            if len(rows):
                own = [index for index in verdicts if index not in joint]
                verdicts |= self._ask_alone(own, rows, keywords, logs)
        outcomes = {index: _attempt(functools.partial(self.rewards[index], **keywords[index])) for index in joint}
        verdicts |= {index: self._accept(index, each, logs[index], rows) for index, each in outcomes.items()}
        return list(verdicts.values())

    def _joint(self) -> dict[int, Ranks]:
        """Return the rewards that all ranks ask together: models that are sharded over them."""
        return {i: r.ranks for i, r in enumerate(self.rewards) if isinstance(r, ModelReward) and r.ranks is not None}

    def _ask_alone(
        self, indices: Sequence[int], rows: Rows, keywords: Sequence[dict[str, Any]], logs: Sequence[RewardLog]
    ) -> dict[int, Verdict]:
        """Return the verdicts of rewards that each rank asks by itself; a sync one that raises spares the later ones their call."""
        verdicts: dict[int, Verdict] = {}
        waiting: dict[int, Callable[[], Awaitable[Any]]] = {}
        for index in indices:
            reward = self.rewards[index]
            if isinstance(reward, FunctionReward) and reward.is_async:
                waiting[index] = functools.partial(reward.call_async, **keywords[index])
            else:
                outcome = _attempt(functools.partial(reward, **keywords[index]))
                verdicts[index] = self._accept(index, outcome, logs[index], rows)
        for index, outcome in self._await_all(waiting).items():
            verdicts[index] = self._accept(index, outcome, logs[index], rows)
        return verdicts

    def _await_all(self, calls: Mapping[int, Callable[[], Awaitable[Any]]]) -> dict[int, Outcome]:
        """Return what came of async calls that all wait together, in their order."""
        if not calls:
            return {}
        outcomes: dict[int, Outcome] = {}

        async def attempt(index: int) -> None:
            try:
                outcomes[index] = Outcome(await calls[index]())
            except (Exception, SystemExit) as error:
                outcomes[index] = Outcome(error=error)

        async def everything() -> None:
            await asyncio.gather(*(attempt(index) for index in calls))

        try:
            self._loop.run(everything(), self._patience())
        except Late:
            stuck = " or ".join(f"'{self.names[index]}'" for index in calls if index not in outcomes)
            late = RewardTimeoutError(
                f"Async reward {stuck} blocks its event loop past its time limit; await what waits."
            )
            return {index: outcomes.get(index, Outcome(error=late)) for index in calls}
        return {index: outcomes[index] for index in calls}

    def _patience(self) -> float | None:
        """Return the seconds after which the loop itself must be stuck: limits inside it act only where a function awaits."""
        limits = [r.timeout for r in self.rewards if isinstance(r, FunctionReward) and r.is_async]
        known = [limit for limit in limits if limit is not None]
        return sum(known) + 1.0 if len(known) == len(limits) else None

    def _accept(self, index: int, outcome: Outcome, log: RewardLog, rows: Rows) -> Verdict:
        verdict = check(self.names[index], outcome, log, rows)
        if verdict.failures:
            if self.settings.on_failure == "raise":
                raise verdict.failures[0]
            logger.warning("%s (not judged: %d of %d rows)", verdict.failures[0], len(verdict.failures), len(rows))
        return verdict

    def _records(self, groups: Sequence[Group], rows: Rows, verdicts: Sequence[Verdict]) -> tuple[Record, ...]:
        pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
        records = []
        for row, (prompt, completion) in enumerate(pairs):
            rewards = tuple(verdict.values[row] for verdict in verdicts)
            prompt_ids = prompt.ids if completion.prompt_ids is None else completion.prompt_ids
            group = rows.places[row][0]
            reward = weighted_sum(rewards, self.settings.weights)
            if abs(reward) > MOST:
                raise RewardError(
                    f"The weighted sum of the rewards is {reward} for {rows.describe(row)}, whose square is infinite in fp32: "
                    "lower reward_weights, or the rewards."
                )
            tokens = self._token_rewards([verdict.tokens.get(row) for verdict in verdicts])
            records.append(Record(group, prompt_ids, completion, rewards, reward, token_rewards=tokens))
        return tuple(records)

    def _token_rewards(self, given: Sequence[tuple[float, ...] | None]) -> torch.Tensor | None:
        """Return the weighted sum of what rewards gave single tokens of a row: float32 [C]; None where none did."""
        weighed = [w * torch.tensor(each) for w, each in zip(self.settings.weights, given, strict=True) if each]
        return torch.stack(weighed).sum(0) if weighed else None

    def _logged_columns(self, verdicts: Sequence[Verdict]) -> dict[str, list[Any]]:
        """Return what the rewards logged; a column that two of them log is the first one's, and the other's by its name."""
        columns: dict[str, list[Any]] = {}
        for name, verdict in zip(self.names, verdicts, strict=True):
            for column, values in verdict.log.columns.items():
                columns[f"{name}/{column}" if column in columns else column] = values
        return columns


def weighted_sum(rewards: Sequence[float], weights: Sequence[float]) -> float:
    """Return `sum(w * r)` over the rewards that are not NaN; NaN where all are."""
    scored = [(reward, weight) for reward, weight in zip(rewards, weights, strict=True) if not math.isnan(reward)]
    return sum(reward * weight for reward, weight in scored) if scored else NONE


def reward_metrics(names: Sequence[str], records: Sequence[Record]) -> dict[str, Metric]:
    """Return `rewards/<name>/mean` and `/std` (unbiased) over the rows that a reward scored: of all ranks' records, TRL's."""
    metrics: dict[str, Metric] = {}
    for index, name in enumerate(names):
        scored = [record.rewards[index] for record in records if not math.isnan(record.rewards[index])]
        metrics[f"rewards/{name}/mean"] = Metric(sum(scored), float(len(scored)))
        # A std of fewer than two is a mean of nothing: it reads as NaN and weighs nothing in a later mean.
        known = len(scored) > 1
        metrics[f"rewards/{name}/std"] = Metric(statistics.stdev(scored) if known else 0.0, float(known))
    return metrics


def warn_of_unscored(names: Sequence[str], judged: Judged) -> None:
    """Say in one warning how many rows have no reward, if there are any, and show the first."""
    rows = [row for row, record in enumerate(judged.records) if math.isnan(record.reward)]
    if rows:
        total = len(judged.records)
        logger.warning(
            "%s completions have no reward from %s, so nothing is learned from them: return a number from at least one reward. "
            "The first is %.60r to %.60r.",
            f"All {total}" if len(rows) == total else f"{len(rows)} of {total}",
            ", ".join(names),
            judged.texts[rows[0]],
            judged.prompts[rows[0]],
        )


def _within(reward: Reward, name: str, timeout: float | None) -> Reward:
    """Return the reward under its name in this panel, and, if it is a function without a limit, under the panel's."""
    if not isinstance(reward, FunctionReward):
        return reward
    own = copy.copy(reward)
    own.name, own.timeout = name, timeout if reward.timeout is None else reward.timeout
    return own


def _keywords(reward: Reward, rows: Rows, trainer_state: Any, log: RewardLog) -> dict[str, Any]:
    """Return what a reward is called with; a judge, which compares rows of a group, is told the groups."""
    groups = {"groups": [group for group, _ in rows.places]} if isinstance(reward, JudgeReward) else {}
    notes = {"log_extra": log.log_extra, "log_metric": log.log_metric}
    return {**rows.keywords(), "trainer_state": trainer_state, **notes, **groups}


def _attempt(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(call())
    except (Exception, SystemExit) as error:
        return Outcome(error=error)

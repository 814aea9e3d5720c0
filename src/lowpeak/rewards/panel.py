"""Station 5: whole groups in, records with their rewards out. Every reward is asked once per call, for all rows.

TRL's semantics: a row's reward is the weighted sum of what its rewards returned, None left out; a row that nobody
scored has reward NaN, which leaves its group's statistics.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lowpeak.errors import ArgumentError, RewardError, RewardTimeoutError
from lowpeak.ranks import Ranks
from lowpeak.records import Group, Metric, Record, merge_metrics
from lowpeak.rewards.function import FunctionReward
from lowpeak.rewards.judged import Judged
from lowpeak.rewards.make import unique_names
from lowpeak.rewards.model import ModelReward
from lowpeak.rewards.outcome import MOST, NONE, RewardCall, Rows, read_rows
from lowpeak.rewards.reward import Reward
from lowpeak.rewards.timeouts import BackgroundLoop, Late

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
        return any(_ranks(reward) is not None for reward in self.rewards)

    def judge(self, groups: Sequence[Group], *, trainer_state: Any = None) -> Judged:
        """Return the groups' rows as records; RewardError if a reward failed and `on_failure` is "raise".

        A column that two rewards log is the first one's, and the other's by its name.
        """
        rows = read_rows(groups, self._decode)
        calls = [
            RewardCall(reward, name, rows, trainer_state) for reward, name in zip(self.rewards, self.names, strict=True)
        ]
        self._ask(calls, rows)
        records = self._records(groups, rows, calls)
        metrics = reward_metrics(self.names, records)
        columns: dict[str, list[Any]] = {}
        for call in calls:
            metrics = merge_metrics(metrics, call.log.metrics)
            if self.settings.on_failure == "none":
                metrics[f"rewards/{call.name}/failed"] = Metric(float(len(call.failures)), kind="sum")
            for column, values in call.log.columns.items():
                columns[f"{call.name}/{column}" if column in columns else column] = values
        return Judged(records, metrics, columns, rows.texts, tuple(rows.prompts))

    def _ask(self, calls: Sequence[RewardCall], rows: Rows) -> None:
        """Make all calls; without rows those alone in which all ranks meet. A sync one that raises spares the later ones theirs."""
        joint = [call for call in calls if _ranks(call.reward) is not None]
        waiting = [call for call in calls if call.is_async]
        ranks = _ranks(joint[0].reward) if joint else None
        with nullcontext() if ranks is None else ranks.together():
            if len(rows):
                for call in calls:
                    if call not in joint and call not in waiting:
                        call.ask()
                        self._accept(call)
                self._await_all(waiting)
                for call in waiting:
                    self._accept(call)
        for call in joint:
            call.ask()
        for call in joint:
            self._accept(call)

    def _await_all(self, calls: Sequence[RewardCall]) -> None:
        """Make async calls that all wait together.

        After all of their limits the loop itself must be stuck: limits inside it act only where a function awaits.
        """
        if not calls:
            return

        async def everything() -> None:
            await asyncio.gather(*(call.ask_async() for call in calls))

        limits = [call.reward.timeout for call in calls if isinstance(call.reward, FunctionReward)]
        known = [limit for limit in limits if limit is not None]
        try:
            self._loop.run(everything(), sum(known) + 1.0 if len(known) == len(limits) else None)
        except Late:
            stuck = [call for call in calls if not call.finished]
            names = " or ".join(f"'{call.name}'" for call in stuck)
            for call in stuck:
                call.error = RewardTimeoutError(
                    f"Async reward {names} blocks its event loop past its time limit; await what waits."
                )

    def _accept(self, call: RewardCall) -> None:
        call.check()
        if call.failures:
            if self.settings.on_failure == "raise":
                raise call.failures[0]
            logger.warning("%s (not judged: %d of %d rows)", call.failures[0], len(call.failures), len(call.values))

    def _records(self, groups: Sequence[Group], rows: Rows, calls: Sequence[RewardCall]) -> tuple[Record, ...]:
        pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
        records = []
        for row, (prompt, completion) in enumerate(pairs):
            rewards = tuple(call.values[row] for call in calls)
            prompt_ids = prompt.ids if completion.prompt_ids is None else completion.prompt_ids
            group = rows.places[row][0]
            reward = weighted_sum(rewards, self.settings.weights)
            if abs(reward) > MOST:
                raise RewardError(
                    f"The weighted sum of the rewards is {reward} for {rows.describe(row)}, whose square is infinite in fp32: "
                    "lower reward_weights, or the rewards."
                )
            tokens = self._token_rewards([call.tokens.get(row, ()) for call in calls])
            records.append(Record(group, prompt_ids, completion, rewards, reward, token_rewards=tokens))
        return tuple(records)

    def _token_rewards(self, given: Sequence[tuple[float, ...]]) -> torch.Tensor | None:
        """Return the weighted sum of what rewards gave single tokens of a row: float32 [C]; None where none did."""
        weighed = [w * torch.tensor(each) for w, each in zip(self.settings.weights, given, strict=True) if each]
        return torch.stack(weighed).sum(0) if weighed else None


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


def _ranks(reward: Reward) -> Ranks | None:
    """Return the ranks that ask the reward together, because it is a model that is sharded over them."""
    return reward.ranks if isinstance(reward, ModelReward) else None


def _within(reward: Reward, name: str, timeout: float | None) -> Reward:
    """Return the reward under its name in this panel, and, if it is a function without a limit, under the panel's."""
    if not isinstance(reward, FunctionReward):
        return reward
    own = copy.copy(reward)
    own.name, own.timeout = name, timeout if reward.timeout is None else reward.timeout
    return own

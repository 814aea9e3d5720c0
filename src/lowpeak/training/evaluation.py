"""Evaluation: held-out prompts answered greedily and by sampling, judged by the run's own rewards."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowpeak.algorithms.select import rows_by_group
from lowpeak.config.rollout import Sampling
from lowpeak.memory.phases import Phase
from lowpeak.records import Prompt, Record
from lowpeak.rewards.combine import warn_of_unscored
from lowpeak.rewards.judged import Judged
from lowpeak.training.rollout_rows import describe, length_metrics
from lowpeak.training.rollouts import RolloutMaker, whole

_EVAL_SEED = 0x5EED


@dataclass(frozen=True)
class Success:
    """What counts as a success: reward number `index` at or above `threshold`."""

    index: int
    threshold: float

    def of(self, record: Record) -> bool:
        """Whether the record's completion succeeds; a reward that did not apply is no success."""
        return record.rewards[self.index] >= self.threshold


@dataclass(frozen=True)
class Evaluation:
    """Metrics with their prefix, and the rows of the greedy and the sampled completions."""

    metrics: dict[str, float]
    rows: tuple[dict[str, object], ...]


def evaluate_prompts(
    maker: RolloutMaker, prompts: Sequence[Prompt], success: Success, prefix: str, trainer_state: Any
) -> Evaluation:
    """Greedy: reward and accuracy; sampled: reward, accuracy and pass@k with `num_generations_eval` completions each.

    The same random numbers each time, so that two evaluations differ by the weights alone.
    """
    start = time.perf_counter()
    sampling = replace(
        maker.settings.sampling,
        num_generations=maker.settings.num_generations_eval,
        seed=maker.settings.sampling.seed + _EVAL_SEED,
    )
    greedy = replace(sampling, num_generations=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    one = _answers(maker, prompts, greedy, trainer_state)
    many = _answers(maker, prompts, sampling, trainer_state)
    warn_of_unscored(maker.panel.names, many)
    metrics = {
        **_reward_metrics(f"{prefix}_greedy", one.records, success),
        **_reward_metrics(prefix, many.records, success),
        **{f"{prefix}_{name}": metric.value() for name, metric in many.metrics.items()},
        **{f"{prefix}_{name}": metric.value() for name, metric in length_metrics(many.records).items()},
        **{f"{prefix}_pass@{k}": value for k, value in _pass_rates(many.records, success).items()},
    }
    seconds = time.perf_counter() - start
    metrics[f"{prefix}_runtime"] = seconds
    metrics[f"{prefix}_samples_per_second"] = len(prompts) / seconds
    rows = [{"decoding": "greedy", **row} for row in describe(one, one.records, maker.panel.names)]
    rows += [{"decoding": "sampled", **row} for row in describe(many, many.records, maker.panel.names)]
    return Evaluation(metrics, tuple(rows))


def _answers(maker: RolloutMaker, prompts: Sequence[Prompt], sampling: Sampling, state: Any) -> Judged:
    """All prompts' groups, in portions of `per_device_eval_batch_size` rows where that was set."""
    rows = maker.settings.eval_rows
    portion = (
        len(prompts) if rows is None else max(1, rows * maker.strategy.ranks.world_size // sampling.num_generations)
    )
    parts = [
        maker.ask(prompts[start : start + portion], sampling, state, start, Phase.EVALUATE)
        for start in range(0, len(prompts), portion)
    ]
    return whole(parts, maker.panel.names)


def _reward_metrics(prefix: str, records: Sequence[Record], success: Success) -> dict[str, float]:
    """Nothing where nobody was scored: a judge cannot compare a completion that is alone."""
    scored = [record.reward for record in records if not math.isnan(record.reward)]
    if not scored:
        return {}
    return {
        f"{prefix}_reward": sum(scored) / len(scored),
        f"{prefix}_accuracy": sum(success.of(record) for record in records) / len(records),
    }


def _pass_rates(records: Sequence[Record], success: Success) -> dict[int, float]:
    """pass@k for k = 1, 2, 4, ... and G: the mean over prompts of 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1)."""
    groups = [[success.of(records[i]) for i in rows] for rows in rows_by_group(records).values()]
    n = min(len(wins) for wins in groups)
    sizes = sorted({*(1 << i for i in range(n.bit_length())), n})
    return {k: sum(_pass_at(k, wins) for wins in groups) / len(groups) for k in sizes}


def _pass_at(k: int, wins: Sequence[bool]) -> float:
    n, c = len(wins), sum(wins)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)

"""Evaluation: held-out prompts answered greedily and by sampling, judged by the run's own rewards.

The sampled completions are also measured as a step would measure them, without gradients and by one scoring pass: loss,
KL, entropy and what else the algorithm says of rows that the policy has just written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowpeak.algorithms import Need, StepCounts, reward_metrics, rows_by_group
from lowpeak.arguments import Sampling
from lowpeak.batching import num_counted, pack
from lowpeak.memory import Phase
from lowpeak.records import Metric, MicroBatch, Prompt, Record, merge_metrics
from lowpeak.rewards import Judged, warn_of_unscored
from lowpeak.training.collector import RolloutMaker, whole, with_advantages
from lowpeak.training.rollout_report import describe, length_metrics
from lowpeak.training.step import loss_of_outputs
from lowpeak.training.step_batches import with_step_shares

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
    maker: RolloutMaker,
    prompts: Sequence[Prompt],
    success: Success,
    prefix: str,
    trainer_state: Any,
    coefficients: Mapping[str, float],
) -> Evaluation:
    """Greedy: reward and accuracy; sampled: reward, accuracy, pass@k with `num_generations_eval` completions each, and loss.

    The same random numbers each time, so that two evaluations differ by the weights alone. `coefficients` are the
    algorithm's own numbers as they are now.
    """
    start = time.perf_counter()
    sampling = replace(
        maker.settings.sampling,
        num_generations=maker.settings.num_generations_eval,
        seed=maker.settings.sampling.seed + _EVAL_SEED,
    )
    greedy = replace(sampling, num_generations=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    with maker.awake():
        maker.load_weights(trainer_state.global_step)
        one = _answers(maker, prompts, greedy, trainer_state)
        many = _answers(maker, prompts, sampling, trainer_state)
    warn_of_unscored(maker.panel.names, many)
    measured = {**_measured(maker, many.records, coefficients), **_numbers(reward_metrics(many.records))}
    metrics = {
        **{f"{prefix}_{name}": value for name, value in measured.items()},
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


def _measured(maker: RolloutMaker, records: Sequence[Record], coefficients: Mapping[str, float]) -> dict[str, float]:
    """Stations 6 to 11 on rows that the policy has just written: the loss, and what the algorithm says of it.

    Old log-probs are the policy's own, so one pass of the policy (and one of the reference) gives all that losses need.
    Every row is measured, or every pair, on every rank alike: scores are gathered, and no further forward is needed.
    """
    algorithm = maker.algorithm
    selection = algorithm.select(records)
    chosen = selection.rows if algorithm.unit == "pair" else range(len(records))
    if not chosen:
        return _numbers(selection.metrics)
    rows, _ = maker.score(maker.with_loss_masks([records[i] for i in chosen]), _needs(maker), Phase.EVALUATE)
    advantages = algorithm.advantages(rows, coefficients)
    rows = with_advantages(rows, advantages)
    counts = StepCounts(len(rows), sum(map(num_counted, rows)))
    batches = pack(
        rows, range(len(rows)), maker.budget, lambda length: algorithm.reduction(length, counts), unit=algorithm.unit
    )
    metrics: dict[str, Metric] = {}
    for batch in with_step_shares(batches, counts, num_ranks=1):
        tokens = replace(batch.tokens, coefficients=coefficients)
        loss, measured = loss_of_outputs(_outputs(batch, rows), tokens, algorithm)
        metrics = merge_metrics(metrics, {"loss": Metric(loss, kind="sum"), **measured})
    return _numbers({**selection.metrics, **advantages.metrics, **metrics})


def _needs(maker: RolloutMaker) -> frozenset[Need]:
    """What an evaluation scores: what the algorithm needs, and all that its losses and metrics read."""
    algorithm = maker.algorithm
    read: dict[Need, bool] = {
        "old": True,
        "entropy": algorithm.entropy_bonus or maker.core.log_entropy,
        "values": algorithm.values is not None,
    }
    return algorithm.needs | {need for need, is_read in read.items() if is_read}


def _outputs(batch: MicroBatch, rows: Sequence[Record]) -> dict[str, torch.Tensor]:
    """What a forward of the micro-batch would give, from what was scored: log-probs are old ones, values those of the rollout."""
    given = {"logprobs": batch.tokens.old_T, "values": batch.tokens.values_T}
    entropies = [(rows[i].entropy, rows[i].completion.loss_mask) for i in batch.record_indices]
    known = [entropy[mask] for entropy, mask in entropies if entropy is not None]
    given["entropy"] = torch.cat(known) if known else None
    return {name: values for name, values in given.items() if values is not None}


def _numbers(metrics: Mapping[str, Metric]) -> dict[str, float]:
    values = {name: metric.value() for name, metric in metrics.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


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

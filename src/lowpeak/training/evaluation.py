"""Evaluation: greedy and sampled completions of held-out prompts, rewarded by the run's rewards.

One scoring pass over the sampled completions also gives the algorithm's loss and metrics, as a step would measure them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowpeak.algorithms import (
    Need,
    StepCounts,
    call_advantages,
    call_select,
    indices_by_group,
    reward_metrics,
    with_effective_size,
    with_loss_masks,
)
from lowpeak.arguments import Sampling
from lowpeak.batching import num_loss_tokens, pack
from lowpeak.memory import Phase
from lowpeak.records import Metric, MicroBatch, Prompt, Record, merge_metrics
from lowpeak.rewards import RewardedCompletions, merge_rewarded_completions, warn_of_unrewarded
from lowpeak.training.collector import RolloutCollector, with_reward_statistics
from lowpeak.training.guarded_passes import GuardedPasses
from lowpeak.training.journal_rows import completion_rows
from lowpeak.training.recovery import attempts
from lowpeak.training.rollout import (
    make_step_batches,
    score_records,
    with_advantages,
    with_step_shares,
)
from lowpeak.training.rollout_metrics import length_metrics
from lowpeak.training.run import Run, RunContext
from lowpeak.training.step import loss_of_outputs, measure_step
from lowpeak.training.step_metrics import StepMetrics, gather_metrics
from lowpeak.training.teacher import run_teacher

_EVAL_SEED = 0x5EED


@dataclass(frozen=True)
class SuccessCriterion:
    """A completion succeeds if its reward number `index` is at least `threshold`, which the user may have chosen."""

    index: int
    threshold: float
    is_chosen: bool = True

    def applies(self, records: Iterable[Record]) -> bool:
        """Return whether successes are counted: the user chose the criterion, or all rewards are 0, 1 or None."""
        rewards = [record.rewards[self.index] for record in records if record.rewards]
        if not rewards:
            return False
        return self.is_chosen or all(reward in (0.0, 1.0) or math.isnan(reward) for reward in rewards)

    def is_met(self, record: Record) -> bool:
        """Return whether the completion succeeds; a reward that did not apply is no success."""
        return record.rewards[self.index] >= self.threshold


@dataclass(frozen=True)
class Evaluation:
    """Metrics under their prefix, and one row per greedy and per sampled completion."""

    metrics: dict[str, float]
    rows: tuple[dict[str, object], ...]


def evaluate_prompts(
    collector: RolloutCollector,
    prompts: Sequence[Prompt],
    success: SuccessCriterion,
    prefix: str,
    trainer_state: Any,
    coefficients: Mapping[str, float],
) -> Evaluation:
    """Return reward, and accuracy if the criterion applies, of greedy and sampled completions, pass@k and loss of the sampled.

    Each prompt gets `num_generations_eval` sampled completions, with the same random numbers in every evaluation, so
    that two evaluations differ by the weights alone. `coefficients` are the algorithm's present numbers.
    """
    start = time.perf_counter()
    sampling = replace(
        collector.settings.sampling,
        num_generations=collector.settings.evaluation.num_generations,
        seed=collector.settings.sampling.seed + _EVAL_SEED,
    )
    greedy = replace(sampling, num_generations=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    if not collector.settings.evaluation.samples:
        sampling = replace(greedy, num_generations=sampling.num_generations)
    with collector.engine_awake():
        collector.sync_weights(trainer_state.global_step)
        one = _complete(collector, prompts, greedy, trainer_state)
        many = _complete(collector, prompts, sampling, trainer_state)
    names = collector.panel.names
    counted = success if success.applies((*one.records, *many.records)) else None
    warn_of_unrewarded(names, many)
    measured = {**_loss_metrics(collector, many.records, coefficients), **_numbers(reward_metrics(many.records))}
    metrics = {
        **{f"{prefix}_{name}": value for name, value in measured.items()},
        **_reward_metrics(f"{prefix}_greedy", one.records, counted),
        **_reward_metrics(prefix, many.records, counted),
        **{f"{prefix}_{name}": metric.value() for name, metric in many.metrics.items()},
        **{f"{prefix}_{name}": metric.value() for name, metric in length_metrics(many.records).items()},
        **{f"{prefix}_pass@{k}": value for k, value in _pass_rates(many.records, counted).items()},
    }
    seconds = time.perf_counter() - start
    metrics[f"{prefix}_runtime"] = seconds
    metrics[f"{prefix}_samples_per_second"] = len(prompts) / seconds
    rows = [
        {"decoding": decoding, **row}
        for decoding, rewarded in (("greedy", one), ("sampled", many))
        for row in completion_rows(rewarded, rewarded.records, names, trainer_state.global_step)
    ]
    return Evaluation(metrics, tuple(rows))


def _loss_metrics(
    collector: RolloutCollector, records: Sequence[Record], coefficients: Mapping[str, float]
) -> dict[str, float]:
    """Return the loss and the algorithm's metrics of completions that the policy has just written: stages 6 to 11.

    Old log-probs are the policy's present ones, so one pass of the policy, and one of the reference, give all that
    losses read. The scores are gathered, so every rank computes the same numbers without another forward pass.
    """
    run = collector.context.run
    algorithm = run.algorithm
    selection = call_select(algorithm.select, records)
    chosen = selection.indices if algorithm.unit == "pair" else range(len(records))
    if not chosen:
        return _numbers(selection.metrics)
    rows = with_loss_masks([records[i] for i in chosen], collector.settings.mask_truncated)
    if algorithm.divergence is not None:
        return _divergence_metrics(collector.context, rows, coefficients)
    rows, _ = score_records(collector.context, rows, _needs(run), Phase.EVALUATE)
    advantages = call_advantages(algorithm.advantages, rows, coefficients)
    rows = with_advantages(rows, advantages)
    counts = StepCounts(len(rows), sum(map(num_loss_tokens, rows)))
    batches = pack(
        rows, range(len(rows)), run.budget, lambda length: algorithm.unit_weight(length, counts), unit=algorithm.unit
    )
    metrics: dict[str, Metric] = {}
    for batch in with_step_shares(batches, counts, num_ranks=1):
        tokens = replace(batch.tokens, coefficients=coefficients)
        loss, measured = loss_of_outputs(_outputs(batch, rows), tokens, algorithm)
        metrics = merge_metrics(metrics, {"loss": Metric(loss, kind="sum"), **measured})
    return _numbers({**selection.metrics, **advantages.metrics, **metrics})


def _divergence_metrics(
    context: RunContext, records: Sequence[Record], coefficients: Mapping[str, float]
) -> dict[str, float]:
    """Return the loss and metrics of completions over all ranks, with a pass of the teacher."""
    records, _ = score_records(context, tuple(records), context.run.algorithm.needs, Phase.EVALUATE)
    rows = with_advantages(records, call_advantages(context.run.algorithm.advantages, records, coefficients))
    for attempt in attempts(context, Phase.SCORE):
        run = context.run
        batches = make_step_batches(rows, range(len(rows)), run.algorithm, run.budget, run.strategy.ranks)
        with attempt:
            numbers = measure_batches(context, batches, attempt.guard(), rows)
    return {"loss": float(numbers.loss), **_numbers(numbers.metrics)}


def measure_batches(
    context: RunContext, batches: Sequence[MicroBatch], guard: GuardedPasses, records: Sequence[Record] = ()
) -> StepMetrics:
    """Return the loss and metrics of micro-batches over all ranks, without gradients, as a step would measure them.

    `records` are those of all ranks' micro-batches; a teacher reads their prompts.
    """
    run = context.run
    teacher, model, ranks = run_teacher(context, batches, guard, records), context.model_wrapped, run.strategy.ranks
    measured = measure_step(model, batches, run.algorithm, run.logprob_settings, ranks, guard, teacher)
    return gather_metrics(StepMetrics(*measured), None, ranks)


def _needs(run: Run) -> frozenset[Need]:
    """Return the scores that the algorithm needs, and those that its losses and metrics read."""
    algorithm = run.algorithm
    read: dict[Need, bool] = {
        "old": True,
        "entropy": algorithm.entropy_bonus or run.logprob_settings.log_entropy,
        "values": algorithm.values is not None,
    }
    return algorithm.needs | {need for need, is_read in read.items() if is_read}


def _outputs(batch: MicroBatch, rows: Sequence[Record]) -> dict[str, torch.Tensor]:
    """Return the outputs of a forward pass of the micro-batch, taken from its scores: log-probs, values, entropies."""
    outputs = {"logprobs": batch.tokens.old_T, "values": batch.tokens.values_T}
    entropies = [(rows[i].entropy, rows[i].completion.loss_mask) for i in batch.record_indices]
    known = [entropy[mask] for entropy, mask in entropies if entropy is not None]
    outputs["entropy"] = torch.cat(known) if known else None
    return {name: values for name, values in outputs.items() if values is not None}


def _numbers(metrics: Mapping[str, Metric]) -> dict[str, float]:
    values = {name: metric.value() for name, metric in with_effective_size(metrics).items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _complete(
    collector: RolloutCollector, prompts: Sequence[Prompt], sampling: Sampling, state: Any
) -> RewardedCompletions:
    """Return all prompts' groups, generated in batches of `per_device_eval_batch_size` completions if that is set."""
    rows, world_size = collector.settings.evaluation.num_rows, collector.context.run.strategy.ranks.world_size
    size = len(prompts) if rows is None else max(1, rows * world_size // sampling.num_generations)
    parts = [
        collector.generate_and_reward(prompts[start : start + size], sampling, state, start, Phase.EVALUATE)
        for start in range(0, len(prompts), size)
    ]
    return with_reward_statistics(merge_rewarded_completions(parts), collector.panel.names)


def _reward_metrics(prefix: str, records: Sequence[Record], success: SuccessCriterion | None) -> dict[str, float]:
    """Return mean reward and accuracy; empty if no record has a reward: a judge cannot compare a single completion."""
    rewards = [record.reward for record in records if not math.isnan(record.reward)]
    if not rewards:
        return {}
    metrics = {f"{prefix}_reward": sum(rewards) / len(rewards)}
    if success is not None:
        metrics[f"{prefix}_accuracy"] = sum(map(success.is_met, records)) / len(records)
    return metrics


def _pass_rates(records: Sequence[Record], success: SuccessCriterion | None) -> dict[int, float]:
    """Return pass@k for k = 1, 2, 4, ... and G: the mean over prompts of 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1)."""
    if success is None:
        return {}
    groups = [[success.is_met(records[i]) for i in rows] for rows in indices_by_group(records).values()]
    n = min(len(wins) for wins in groups)
    sizes = sorted({*(1 << i for i in range(n.bit_length())), n})
    return {k: sum(_pass_at(k, wins) for wins in groups) / len(groups) for k in sizes}


def _pass_at(k: int, wins: Sequence[bool]) -> float:
    n, c = len(wins), sum(wins)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)

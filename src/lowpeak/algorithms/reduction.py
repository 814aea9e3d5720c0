"""Reduction: what each of a row's units weighs, from the row's counted tokens and the counts of the whole step.

The trained loss is `sum(weights_U * loss_U)` over all units of all ranks, so micro-batches never change it. With N rows
in the step, T counted tokens in the step and `length` in the row, a token weighs

    grpo                 1 / (length * N)                  each row's mean, averaged over rows
    dr_grpo              1 / (max_completion_length * N)   arXiv 2503.20783: no length bias
    dapo, bnpo, cispo    1 / T                             each token alike

`bnpo` is `dapo` here: its batch is the step, not the micro-batch it is in TRL. A sequence weighs as much as its tokens
together, because its loss is their mean. Rows without counted tokens count in N and weigh 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lowpeak.algorithms.algorithm import StepCounts
from lowpeak.arguments import GRPOSettings

Reduction = Callable[[int, StepCounts], float]


def row_mean(length: int, counts: StepCounts) -> float:
    """A token's share of its row's mean, rows averaged: 1 / (length * N), 0 for a row without tokens."""
    return 1.0 / (length * counts.num_rows) if length else 0.0


def longest_mean(max_length: int, length: int, counts: StepCounts) -> float:
    """A token's share when each row is divided by the same `max_length`: 1 / (max_length * N)."""
    return 1.0 / (max_length * counts.num_rows) if length else 0.0


def token_mean(length: int, counts: StepCounts) -> float:
    """A token's share of the mean over the step's tokens: 1 / T."""
    return 1.0 / counts.num_tokens if length else 0.0


def whole_row(token_weight: Reduction, length: int, counts: StepCounts) -> float:
    """What a row's tokens weigh together: the weight of a sequence whose loss is its tokens' mean."""
    return length * token_weight(length, counts)


def sequence_mean(length: int, counts: StepCounts) -> float:
    """A sequence's share of the mean over rows: 1 / N, 0 for a row without tokens."""
    return 1.0 / counts.num_rows if length else 0.0


def pair_mean(length: int, counts: StepCounts) -> float:
    """A pair's share of the mean over pairs, which have two rows each: 2 / N."""
    return 2.0 / counts.num_rows if length else 0.0


def grpo_reduction(settings: GRPOSettings) -> Reduction:
    """The weight that a loss type gives to a unit: a token, or at sequence level a whole row."""
    token_weight: Reduction = token_mean
    if settings.loss_type == "grpo":
        token_weight = row_mean
    elif settings.loss_type == "dr_grpo":
        token_weight = partial(longest_mean, settings.max_completion_length)
    return partial(whole_row, token_weight) if settings.importance_level == "sequence" else token_weight

"""Reductions: token values to sequences and pairs, and units to the loss of a step.

The trained loss is `sum(weights_U * loss_U)` over all units of all ranks, with weights from the counts of the whole step. So
the split into micro-batches never changes it. An algorithm's `reduction` gives the weight of a unit, for N sequences and T
loss tokens in the step and `length` loss tokens in the sequence (or pair). Sequences without loss tokens count in N and
weigh 0.

Shapes: T loss tokens of a micro-batch, B of its sequences, U of its pairs. Segment sums never wait for the device; a sequence
without loss tokens gives 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import StepCounts
from lowpeak.records import TokenBatch

Reduction = Callable[[int, StepCounts], float]


def token_mean(length: int, counts: StepCounts) -> float:
    """Return a token's weight in the mean over the step's tokens: 1 / T."""
    return 1.0 / counts.num_tokens if length else 0.0


def sequence_mean(length: int, counts: StepCounts) -> float:
    """Return a sequence's weight in the mean over sequences: 1 / N."""
    return 1.0 / counts.num_sequences if length else 0.0


def pair_mean(length: int, counts: StepCounts) -> float:
    """Return a pair's weight in the mean over pairs, which have two sequences each: 2 / N."""
    return 2.0 / counts.num_sequences if length else 0.0


def sum_per_sequence(values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the sum over each sequence's tokens: [B]."""
    return values_T.new_zeros(tokens.num_sequences).index_add(0, tokens.sequences_T, values_T)


def mean_per_sequence(values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the mean over each sequence's tokens: [B]."""
    return sum_per_sequence(values_T, tokens) / sum_per_sequence(torch.ones_like(values_T), tokens).clamp(min=1.0)


def value_per_sequence(values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the value that all tokens of a sequence share: [B], without the rounding of a mean."""
    return values_T.new_zeros(tokens.num_sequences).scatter(0, tokens.sequences_T, values_T)


def repeat_per_token(values_B: Tensor, tokens: TokenBatch) -> Tensor:
    """Return each sequence's value at each of its tokens: [T]."""
    return values_B.index_select(0, tokens.sequences_T)


def sum_per_pair(values_B: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the sum over each pair's two sequences: [U]."""
    assert tokens.pairs_B is not None, "the unit must be a pair"
    return values_B.new_zeros(len(tokens.weights_U)).index_add(0, tokens.pairs_B, values_B)

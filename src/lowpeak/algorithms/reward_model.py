"""Reward models: of two answers, the one that people chose gets the higher score (Bradley and Terry 1952).

The loss of a pair is `-logsigmoid(chosen - rejected)`, InstructGPT's equation 1 (arXiv 2203.02155) with one pair a comparison;
with a margin Llama 2's equation 2 (arXiv 2307.09288); and `center` keeps rewards around 0 (arXiv 2312.09244, equation 2).

A row's reward is its value at its end. The pair's advantages say which row is which, +1 at the chosen one's counted token and
-1 at the rejected one's; its returns, what values are to become, are apart by the margin. Both are known when a row is read.
Shapes: T counted tokens, one a row; B rows; U pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lowpeak.algorithms.algorithm import Advantages, Algorithm, ValueTerm
from lowpeak.algorithms.group_filter import select_all
from lowpeak.algorithms.metrics import mean_of
from lowpeak.algorithms.reduction import pair_mean
from lowpeak.algorithms.segment_ops import pair_sums, row_values
from lowpeak.records import Metric, Record, TokenBatch


def make_reward_model(center: float = 0.0) -> Algorithm:
    """Return reward training: pairs, each weighing alike; nothing is scored beforehand, and no log-prob is formed.

    `center` weighs the square of a pair's summed rewards in the loss; 0 leaves it out.
    """
    return Algorithm(
        name="reward",
        unit="pair",
        needs=frozenset(),
        select=select_all,
        advantages=_as_read,
        reduction=pair_mean,
        loss=None,
        measure=lambda logprobs_T, entropy_T, tokens: {},
        values=ValueTerm(partial(preference_loss, center), measure_preferences),
        idle=False,
    )


def preference_loss(center: float, values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """`-logsigmoid(chosen - rejected - margin) + center * (chosen + rejected)^2` of each pair: [U]."""
    assert tokens.returns_T is not None, "a pair's margin is in its returns"
    beyond_U = _difference(values_T, tokens) - _difference(tokens.returns_T, tokens)
    loss_U = -F.logsigmoid(beyond_U)
    if center:
        loss_U = loss_U + center * pair_sums(row_values(values_T, tokens), tokens).square()
    return loss_U


def measure_preferences(values_T: Tensor, tokens: TokenBatch) -> dict[str, Metric]:
    """TRL's metrics: share of pairs in their order, mean difference, mean and extremes of all rows' rewards."""
    assert tokens.pairs_B is not None, "the unit is a pair"
    difference_U, rewards_B = _difference(values_T, tokens), row_values(values_T, tokens)
    counts_U = tokens.weights_U > 0
    counts_B = counts_U[tokens.pairs_B]
    kept_U, kept_B = counts_U.to(values_T.dtype), counts_B.to(values_T.dtype)
    return {
        "accuracy": mean_of((difference_U > 0).to(values_T.dtype), kept_U),
        "margin": mean_of(difference_U, kept_U),
        "mean_reward": mean_of(rewards_B, kept_B),
        "min_reward": Metric(torch.where(counts_B, rewards_B, math.inf).min(), kind="min"),
        "max_reward": Metric(torch.where(counts_B, rewards_B, -math.inf).max(), kind="max"),
    }


def _difference(values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """The chosen row's value less the rejected one's, of each pair: [U]."""
    return pair_sums(row_values(values_T * tokens.advantages_T, tokens), tokens)


def _as_read(records: Sequence[Record], state: Mapping[str, float]) -> Advantages:
    """The pairs' own."""
    advantages = tuple(record.advantages for record in records if record.advantages is not None)
    returns = tuple(record.returns for record in records if record.returns is not None)
    assert len(advantages) == len(returns) == len(records), "a preference is known when its row is read"
    return Advantages(advantages, {}, returns)

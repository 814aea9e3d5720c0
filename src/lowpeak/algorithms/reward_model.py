"""Reward models: of two answers, the one that people chose gets the higher score (Bradley and Terry 1952).

    L = -logsigmoid(chosen - rejected - margin) + center * (chosen + rejected)^2      per pair

InstructGPT's equation 1 (arXiv 2203.02155) with one pair a comparison; with a margin Llama 2's equation 2 (arXiv 2307.09288).
`center` keeps rewards around 0 (arXiv 2312.09244, equation 2).

A sequence's reward is its value at its end, its only loss token. The reader of the dataset marks the pair: advantages are +1
at the chosen sequence's loss token and -1 at the rejected one's, and the difference of their returns is the margin.
Shapes: T loss tokens of a micro-batch, one a sequence; B sequences; U pairs.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lowpeak.algorithms.algorithm import Algorithm, ValueTerm
from lowpeak.algorithms.groups import advantages_of_dataset, select_all
from lowpeak.algorithms.loss_terms import pair_mean, sum_per_pair, value_per_sequence
from lowpeak.algorithms.metrics import masked_mean
from lowpeak.records import Metric, TokenBatch


def make_reward_model(center: float = 0.0) -> Algorithm:
    """Return reward training: pairs of equal weight, no scoring pass, no log-probs."""
    return Algorithm(
        name="reward",
        unit="pair",
        needs=frozenset(),
        select=select_all,
        advantages=advantages_of_dataset,
        reduction=pair_mean,
        loss=None,
        measure=lambda logprobs_T, entropy_T, tokens: {},
        values=ValueTerm(partial(preference_loss, center), measure_preferences),
        skip_zero_advantage=False,
    )


def preference_loss(center: float, values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the loss of each pair: [U]."""
    assert tokens.returns_T is not None, "a pair's margin is in its returns"
    margin_U = _difference(tokens.returns_T, tokens)
    loss_U = -F.logsigmoid(_difference(values_T, tokens) - margin_U)
    if center:
        loss_U = loss_U + center * sum_per_pair(value_per_sequence(values_T, tokens), tokens).square()
    return loss_U


def measure_preferences(values_T: Tensor, tokens: TokenBatch) -> dict[str, Metric]:
    """Return TRL's metrics: share of correctly ordered pairs, mean difference, mean and extremes of rewards."""
    assert tokens.pairs_B is not None, "the unit must be a pair"
    difference_U, rewards_B = _difference(values_T, tokens), value_per_sequence(values_T, tokens)
    has_weight_U = tokens.weights_U > 0
    has_weight_B = has_weight_U[tokens.pairs_B]
    mask_U, mask_B = has_weight_U.to(values_T.dtype), has_weight_B.to(values_T.dtype)
    return {
        "accuracy": masked_mean((difference_U > 0).to(values_T.dtype), mask_U),
        "margin": masked_mean(difference_U, mask_U),
        "mean_reward": masked_mean(rewards_B, mask_B),
        "min_reward": Metric(torch.where(has_weight_B, rewards_B, math.inf).min(), kind="min"),
        "max_reward": Metric(torch.where(has_weight_B, rewards_B, -math.inf).max(), kind="max"),
    }


def _difference(values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the chosen sequence's value minus the rejected one's: [U]."""
    return sum_per_pair(value_per_sequence(values_T * tokens.advantages_T, tokens), tokens)

"""KTO (Ethayarajh et al. 2024, arXiv 2402.01306): single completions of a dataset, each desirable or not.

With a completion's log-ratio `r = sum(logprob - reference)` over its tokens, s the sigmoid and z0 >= 0 an estimate of the KL of
the policy from the reference:

    desirable      desirable_weight * (1 - s(beta * (r - z0)))        equation 7
    undesirable    undesirable_weight * (1 - s(beta * (z0 - r)))
    apo_zero_unpaired: the same with z0 = 0 (arXiv 2408.06266)

The trainer estimates z0 from the whole step: the mean log-ratio of mismatched pairs, prompt i with completion i - 1. The loss
is the mean over the step's completions.

Advantages are +1 / (desirable completions of the step) or -1 / (undesirable ones) at each token; returns are z0.
Shapes: T loss tokens of a micro-batch, B of its sequences, which are the units.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Algorithm
from lowpeak.algorithms.groups import advantages_of_dataset, select_all
from lowpeak.algorithms.loss_terms import sequence_mean, sum_per_sequence, value_per_sequence
from lowpeak.algorithms.metrics import masked_mean, measure_completions
from lowpeak.arguments import KTOSettings
from lowpeak.records import Metric, TokenBatch


def make_kto(settings: KTOSettings) -> Algorithm:
    """Return KTO: completions weighted by their label, scored by the reference."""
    return Algorithm(
        name="kto",
        unit="sequence",
        needs=frozenset({"reference"} if settings.scores_in_steps else ()),
        select=select_all,
        advantages=advantages_of_dataset,
        reduction=sequence_mean,
        loss=partial(kto_loss, settings),
        measure=partial(measure_kto, settings),
        skip_zero_advantage=False,
    )


def kto_loss(settings: KTOSettings, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the loss of each completion: [B]."""
    assert tokens.reference_T is not None, "a log-ratio needs the reference's log-probs"
    assert tokens.returns_T is not None, "z0 is in the returns"
    sign_B = value_per_sequence(tokens.advantages_T, tokens).sign()
    distance_B = sum_per_sequence(logprobs_T - tokens.reference_T, tokens)
    distance_B = distance_B - value_per_sequence(tokens.returns_T, tokens)
    weight_B = torch.full_like(sign_B, settings.undesirable_weight).masked_fill(sign_B > 0, settings.desirable_weight)
    return weight_B * (1 - (settings.beta * sign_B * distance_B).sigmoid())


def measure_kto(
    settings: KTOSettings, logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch
) -> dict[str, Metric]:
    """Return TRL's metrics; `rewards/margins` only of steps with both labels."""
    assert tokens.returns_T is not None, "z0 is in the returns"
    share_B, mask_B = value_per_sequence(tokens.advantages_T, tokens), (tokens.weights_U > 0).to(logprobs_T.dtype)
    ones_T = torch.ones_like(logprobs_T)
    metrics, reward_B = measure_completions(settings.beta, ones_T, share_B, mask_B, logprobs_T, entropy_T, tokens)
    # A share of 1 / (completions of the step) is that of a step with one label.
    share_B = share_B * mask_B * (share_B.abs() > tokens.sequence_share * (1 + 1e-6))
    return {
        **metrics,
        "rewards/margins": Metric((share_B * reward_B).sum(), share_B.abs().sum() / 2),
        "kl": masked_mean(value_per_sequence(tokens.returns_T, tokens), mask_B),
    }

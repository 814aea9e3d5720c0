"""Losses of GRPO's family and of RLOO, per unit: pure, differentiable, without a host synchronisation.

Shapes: T counted tokens of a micro-batch, B of its rows; a loss's units U are one or the other. What a unit weighs is
`reduction`'s affair, and the trained loss is `sum(weights_U * loss_U)`. Numbers: log-probs in nats.

1. `delta` caps the ratio before it meets the advantage, so it bounds tokens of negative advantage, whose ratio the
   clip leaves open above (INTELLECT-2, arXiv 2505.07291).
2. CISPO's ceiling is 1 + clip_high here as everywhere (MiniMax-M1, arXiv 2506.13585, writes the offset too); TRL takes
   the ceiling itself. It has no floor.
3. The KL is weighed like the policy term, by the loss type's weights. The entropy bonus is not: it is the mean over the
   step's tokens under every loss type (`training/step.py`).
4. The top-entropy mask (arXiv 2506.01939) silences the policy term alone: its tokens come with advantage 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowpeak.algorithms.importance import importance_ratio, product_ratio
from lowpeak.algorithms.kl import kl_estimate
from lowpeak.algorithms.rollout_correction import step_weights
from lowpeak.algorithms.segment_ops import row_means, row_values
from lowpeak.arguments import GRPOSettings, RLOOSettings
from lowpeak.records import TokenBatch


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, delta: float | None = None
) -> Tensor:
    """`-min(min(ratio, delta) * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`, elementwise (PPO's, two-sided)."""
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(bounded * advantages, clipped * advantages)


def clipped_weight(logprobs: Tensor, ratio: Tensor, advantages: Tensor, clip_high: float) -> Tensor:
    """`-stopgrad(min(ratio, 1 + clip_high)) * A * logprob`, elementwise: CISPO, every token keeps a gradient."""
    return -ratio.detach().clamp(max=1.0 + clip_high) * advantages * logprobs


def grpo_loss(settings: GRPOSettings, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """A unit's GRPO loss: `weight * policy + beta * KL` of a token [T], or its mean over a row [B].

    The weight is 1, or corrects the sampler's drift (`correction.py`). The unit is a row where `importance_level` is
    "sequence" (GSPO): all of a row's tokens then share one ratio. A row without counted tokens has loss 0.
    """
    ratio_T = importance_ratio(logprobs_T, tokens, settings.importance_level)
    loss_T = policy_loss(settings, logprobs_T, ratio_T, tokens.advantages_T)
    if settings.step_correction is not None:
        loss_T = loss_T * step_weights(settings.step_correction, logprobs_T, tokens)
    if settings.beta != 0.0:
        loss_T = loss_T + settings.beta * grpo_kl(settings, logprobs_T, ratio_T, tokens)
    return row_means(loss_T, tokens) if settings.importance_level == "sequence" else loss_T


def policy_loss(settings: GRPOSettings, logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor) -> Tensor:
    """The policy-gradient term of each token: [T]. CISPO's is its own; the other loss types share the surrogate."""
    if settings.loss_type == "cispo":
        return clipped_weight(logprobs_T, ratio_T, advantages_T, settings.clip_high)
    assert settings.clip_low is not None, "only CISPO has no lower clip"
    return clipped_surrogate(ratio_T, advantages_T, settings.clip_low, settings.clip_high, settings.delta)


def grpo_kl(settings: GRPOSettings, logprobs_T: Tensor, ratio_T: Tensor, tokens: TokenBatch) -> Tensor:
    """The KL estimate of each token, times its differentiable, unclipped ratio when bias-corrected: [T].

    The correction makes the gradient that of the reverse KL, on-policy too (DeepSeek-V3.2, arXiv 2512.02556).
    """
    assert tokens.reference_T is not None, "a KL needs the reference's log-probs"
    kl_T = kl_estimate(logprobs_T, tokens.reference_T, settings.kl_estimator)
    return kl_T * ratio_T if settings.bias_corrected_kl else kl_T


def rloo_loss(settings: RLOOSettings, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """RLOO's loss of each row: the clipped surrogate of `exp(sum(logprob) - sum(old))` and the row's advantage, [B].

    On-policy its gradient is REINFORCE's, `-A * sum(grad logprob)` (arXiv 2402.14740).
    """
    advantages_B = row_values(tokens.advantages_T, tokens)
    ratio_B = product_ratio(logprobs_T, tokens)
    loss_B = clipped_surrogate(ratio_B, advantages_B, settings.clip_low, settings.clip_high)
    if settings.step_correction is None:
        return loss_B
    return loss_B * row_values(step_weights(settings.step_correction, logprobs_T, tokens), tokens)


def supervised_loss(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """The cross-entropy of each token, `-logprob`: [T]."""
    return -logprobs_T


def dft_loss(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Dynamic fine-tuning's cross-entropy, weighed by the token's probability: `-stopgrad(p) * logprob`, [T] (arXiv 2508.05629)."""
    return -logprobs_T.detach().exp() * logprobs_T

"""Terms that policy-gradient losses share: importance ratios, the clipped surrogate, estimates of the KL divergence.

Shapes: T loss tokens of a micro-batch, B of its sequences. On-policy (`old_T` is None) every ratio is exactly 1, and its
gradient is the gradient of the log-prob.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowpeak.algorithms.reduction import mean_per_sequence, repeat_per_token, sum_per_sequence
from lowpeak.arguments import ImportanceLevel, KLEstimator
from lowpeak.records import TokenBatch

# exp() of more overflows float32, and the zero gradient of a clipped term times infinity is NaN. Sums over thousands of
# tokens get there. A ratio above e^80 becomes e^80, without a gradient.
_LARGEST_LOG_RATIO = 80.0


def old_logprobs(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the scored old log-probs, or on-policy the policy's log-probs, detached."""
    return logprobs_T.detach() if tokens.old_T is None else tokens.old_T


def token_ratio(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return `exp(logprob - old)` of each token: [T]."""
    return bounded_exp(logprobs_T - old_logprobs(logprobs_T, tokens))


def mean_ratio(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return GSPO's ratio of a sequence, `exp(mean(logprob - old))`: [B] (arXiv 2507.18071)."""
    return bounded_exp(mean_per_sequence(logprobs_T - old_logprobs(logprobs_T, tokens), tokens))


def product_ratio(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the ratio of a sequence's probabilities, `exp(sum(logprob) - sum(old))`: [B]."""
    return bounded_exp(sum_per_sequence(logprobs_T - old_logprobs(logprobs_T, tokens), tokens))


def importance_ratio(logprobs_T: Tensor, tokens: TokenBatch, level: ImportanceLevel) -> Tensor:
    """Return each token's ratio, or at sequence level GSPO's ratio of its sequence: [T]."""
    if level == "token":
        return token_ratio(logprobs_T, tokens)
    return repeat_per_token(mean_ratio(logprobs_T, tokens), tokens)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return `exp(log_ratio)`, bounded below float32's overflow: elementwise, differentiable."""
    return torch.exp(log_ratio.clamp(max=_LARGEST_LOG_RATIO))


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, delta: float | None = None
) -> Tensor:
    """Return `-min(min(ratio, delta) * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`, elementwise.

    PPO's clipped objective (arXiv 1707.06347, equation 7). `delta` bounds the ratio of negative advantages, which the clip
    leaves unbounded above (INTELLECT-2, arXiv 2505.07291).
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(bounded * advantages, clipped * advantages)


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Return k1 = p - r, k2 = (p - r)^2 / 2, or k3 = exp(r - p) - (r - p) - 1: elementwise, in nats, differentiable.

    p and r are the policy's and the reference's log-prob of a token that the policy sampled (Schulman 2020, "Approximating
    KL Divergence"). The mean of k1 and of k3 is KL(policy || reference); k1 can be negative for a token, k3 cannot. The mean
    of k2 is biased, but its gradient is the KL's.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(-log_ratio) + log_ratio

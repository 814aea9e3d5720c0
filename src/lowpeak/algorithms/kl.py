"""KL estimators: how far the policy is from the reference, per sampled token (Schulman 2020, "Approximating KL").

With p the policy's and r the reference's log-prob of a token that the policy sampled, the mean of k1 and of k3 is
KL(policy || reference); k1 can be negative for a token, k3 cannot. The mean of k2 is biased, but its gradient is KL's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowpeak.arguments import KLEstimator


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """k1 = p - r, k2 = (p - r)^2 / 2, or k3 = exp(r - p) - (r - p) - 1: elementwise, in nats, differentiable."""
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(-log_ratio) + log_ratio

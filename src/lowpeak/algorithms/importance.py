"""Importance: how much likelier the policy makes a token, or a whole row, than the weights that were scored as old.

Shapes: T counted tokens of a micro-batch, B of its rows. On-policy (`old_T` is None) every ratio is exactly 1, and its
gradient is the gradient of the log-prob.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowpeak.algorithms.segment_ops import over_tokens, row_means, row_sums
from lowpeak.arguments import ImportanceLevel
from lowpeak.records import TokenBatch

# exp() of more overflows float32, and the zero gradient of a clipped term times infinity is NaN. Sums over thousands of
# tokens get there. A ratio above e^80 is held at e^80, without a gradient.
_LARGEST_LOG_RATIO = 80.0


def old_logprobs(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """The old log-probs: the scored ones, or on-policy the policy's own, detached."""
    return logprobs_T.detach() if tokens.old_T is None else tokens.old_T


def token_ratio(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """`exp(logprob - old)` of each token: [T]."""
    return bounded_exp(logprobs_T - old_logprobs(logprobs_T, tokens))


def mean_ratio(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """GSPO's ratio of a row, `exp(mean(logprob - old))` over its counted tokens: [B] (arXiv 2507.18071)."""
    return bounded_exp(row_means(logprobs_T - old_logprobs(logprobs_T, tokens), tokens))


def product_ratio(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """The ratio of a row's probabilities, `exp(sum(logprob) - sum(old))` over its counted tokens: [B]."""
    return bounded_exp(row_sums(logprobs_T - old_logprobs(logprobs_T, tokens), tokens))


def importance_ratio(logprobs_T: Tensor, tokens: TokenBatch, level: ImportanceLevel) -> Tensor:
    """Each token's own ratio, or at sequence level GSPO's ratio of its row: [T]."""
    if level == "token":
        return token_ratio(logprobs_T, tokens)
    return over_tokens(mean_ratio(logprobs_T, tokens), tokens)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)`, held below what overflows float32: elementwise, differentiable."""
    return torch.exp(log_ratio.clamp(max=_LARGEST_LOG_RATIO))

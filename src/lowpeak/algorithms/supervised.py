"""Supervised fine-tuning: maximum likelihood of given completions, as the mean over the step's tokens.

    nll    L = -logprob
    dft    L = -stopgrad(exp(logprob)) * logprob      dynamic fine-tuning, arXiv 2508.05629

Shape: T loss tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Advantages, Algorithm
from lowpeak.algorithms.groups import select_all
from lowpeak.algorithms.loss_terms import token_mean
from lowpeak.algorithms.metrics import masked_mean, weighted_tokens
from lowpeak.arguments import SupervisedLossType
from lowpeak.records import Metric, Record, TokenBatch


def make_supervised(loss_type: SupervisedLossType = "nll") -> Algorithm:
    """Return supervised training; it has no advantages, so no sequence is skipped for them."""
    return Algorithm(
        name="sft",
        unit="token",
        needs=frozenset(),
        select=select_all,
        advantages=_no_advantages,
        reduction=token_mean,
        loss=dft_loss if loss_type == "dft" else nll_loss,
        measure=measure_supervised,
        skip_zero_advantage=False,
        top1=True,
    )


def _no_advantages(records: Sequence[Record], coefficients: Mapping[str, float]) -> Advantages:
    return Advantages(tuple(torch.zeros(len(record.completion)) for record in records), {})


def nll_loss(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the cross-entropy of each token: [T]."""
    return -logprobs_T


def dft_loss(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the cross-entropy of each token, weighted by the token's probability: [T]."""
    return -logprobs_T.detach().exp() * logprobs_T


def measure_supervised(logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch) -> dict[str, Metric]:
    """Return the entropy, if the pass computed it."""
    return {} if entropy_T is None else {"entropy": masked_mean(entropy_T, weighted_tokens(tokens, "token"))}

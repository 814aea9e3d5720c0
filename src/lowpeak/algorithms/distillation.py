"""Distillation: the divergence from a teacher at each token of the policy's completions, as the mean over the step's tokens.

    beta 0   KL(q | p)      forward, covers what the teacher does
    beta 1   KL(p | q)      reverse, avoids what the teacher does not do
    else     beta KL(q | m) + (1 - beta) KL(p | m),  m = (1 - beta) p + beta q      generalised JSD (arXiv 2306.13649)

with p the policy's and q the teacher's distribution of the next token. No gradient flows through the sampling of completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Advantages, Algorithm, DivergenceTerm
from lowpeak.algorithms.groups import reward_metrics, select_all
from lowpeak.algorithms.loss_terms import token_mean
from lowpeak.algorithms.metrics import masked_mean, measure_pass, weighted_tokens
from lowpeak.arguments import DistillationSettings
from lowpeak.records import Metric, Record, TokenBatch


def make_distillation(settings: DistillationSettings) -> Algorithm:
    """Return distillation; rewards are measured and train nothing."""
    return Algorithm(
        name="distillation",
        unit="token",
        needs=frozenset(),
        select=select_all,
        advantages=_reward_metrics_alone,
        reduction=token_mean,
        loss=None,
        measure=measure_pass,
        skip_zero_advantage=False,
        divergence=DivergenceTerm(settings.beta, lambda divergence_T, tokens: divergence_T, measure_divergence),
    )


def _reward_metrics_alone(records: Sequence[Record], coefficients: Mapping[str, float]) -> Advantages:
    return Advantages(tuple(torch.zeros(len(record.completion)) for record in records), reward_metrics(records))


def measure_divergence(divergence_T: Tensor, log_ratio_T: Tensor, tokens: TokenBatch) -> dict[str, Metric]:
    """Return `divergence`, and `teacher_kl`, the mean of log p - log q over tokens that the teacher knows; nats per token."""
    mask_T = weighted_tokens(tokens, "token")
    known_T = torch.where(log_ratio_T.isfinite(), mask_T, 0.0)
    return {
        "divergence": masked_mean(divergence_T, mask_T),
        "teacher_kl": masked_mean(log_ratio_T.nan_to_num(posinf=0.0), known_T),
    }

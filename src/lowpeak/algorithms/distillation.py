"""Distillation: the divergence from a teacher at each token of the policy's completions, as the mean over the step's tokens.

    beta 0   KL(q | p)      forward, covers what the teacher does
    beta 1   KL(p | q)      reverse, avoids what the teacher does not do
    else     beta KL(q | m) + (1 - beta) KL(p | m),  m = (1 - beta) p + beta q      generalised JSD (arXiv 2306.13649)

with p the policy's and q the teacher's distribution of the next token. No gradient flows through the sampling of completions.

Variants, by settings:
1. Sampled (arXiv 2306.08543 in its form of policy gradients): log q - log p of the sampled tokens are advantages, and
   the loss is GRPO's. In expectation over tokens its gradient is that of the reverse KL.
2. With a weight w below 1 (SDPO, arXiv 2601.20802): w times the teacher's part, and 1 - w times GRPO's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Advantages, Algorithm, DivergenceTerm
from lowpeak.algorithms.groups import reward_metrics, select_all
from lowpeak.algorithms.grpo import grpo_advantages, grpo_loss, make_grpo
from lowpeak.algorithms.loss_terms import corrected_advantages, token_mean
from lowpeak.algorithms.metrics import masked_mean, measure_pass, weighted_tokens
from lowpeak.arguments import DistillationSettings, GRPOSettings
from lowpeak.records import Metric, Record, TokenBatch


def make_distillation(settings: DistillationSettings) -> Algorithm:
    """Return distillation; without a policy loss rewards are measured and train nothing."""
    policy, weight = settings.policy, settings.weight
    if settings.mode == "sampled_token":
        assert policy is not None, "sampled divergences are advantages of a policy loss"
        return replace(
            make_grpo(policy),
            name="distillation",
            needs=frozenset({"old", "reference"}),
            advantages=partial(corrected_advantages, policy, partial(_sampled_advantages, settings, policy)),
            skip_zero_advantage=False,
        )
    term = DivergenceTerm(settings.beta, lambda divergence_T, tokens: weight * divergence_T, measure_divergence)
    if policy is not None:
        loss = partial(_weighted_policy_loss, policy, 1 - weight)
        return replace(make_grpo(policy), name="distillation", loss=loss, divergence=term, skip_zero_advantage=False)
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
        divergence=term,
    )


def _weighted_policy_loss(policy: GRPOSettings, weight: float, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    return weight * grpo_loss(policy, logprobs_T, tokens)


def _reward_metrics_alone(records: Sequence[Record], coefficients: Mapping[str, float]) -> Advantages:
    return Advantages(tuple(torch.zeros(len(record.completion)) for record in records), reward_metrics(records))


def _sampled_advantages(settings: DistillationSettings, policy: GRPOSettings, records: Sequence[Record]) -> Advantages:
    """Return w * (log q - log p) of each sampled token plus (1 - w) times GRPO's advantages, and `teacher_kl`."""
    of_rewards = grpo_advantages(policy, records) if settings.weight < 1 else _reward_metrics_alone(records, {})
    gaps = [_teacher_gap(record) for record in records]
    per_token = tuple(
        settings.weight * gap + (1 - settings.weight) * advantages
        for gap, advantages in zip(gaps, of_rewards.per_token, strict=True)
    )
    masks = [record.completion.loss_mask for record in records]
    kl = masked_mean(-torch.cat(gaps), torch.cat(masks).float()) if gaps else None
    return replace(
        of_rewards,
        per_token=per_token,
        metrics=of_rewards.metrics if kl is None else {**of_rewards.metrics, "teacher_kl": kl},
    )


def _teacher_gap(record: Record) -> Tensor:
    """Return log q - log p of each loss token, 0 elsewhere: float32 [C]."""
    assert record.old is not None
    assert record.reference is not None
    return torch.where(record.completion.loss_mask, record.reference - record.old, 0.0)


def measure_divergence(divergence_T: Tensor, log_ratio_T: Tensor, tokens: TokenBatch) -> dict[str, Metric]:
    """Return `divergence`, and `teacher_kl`, the mean of log p - log q over tokens that the teacher knows; nats per token."""
    mask_T = weighted_tokens(tokens, "token")
    # An id that the teacher does not have has log q = -inf: its ratio is infinite, and no part of the mean.
    known_T = torch.where(log_ratio_T.isfinite(), mask_T, 0.0)
    return {
        "divergence": masked_mean(divergence_T, mask_T),
        "teacher_kl": masked_mean(log_ratio_T.nan_to_num(posinf=0.0), known_T),
    }

"""RLOO (arXiv 2402.14740): REINFORCE on whole completions, with the rest of the group as the baseline.

    r = clip(reward) - beta * sum(KL of the completion's tokens)
    A = r - mean(r of the group's other sequences)                        one number for a completion, fixed for the rollout
    L = -min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A)       per sequence, ratio = exp(sum(logprob - old))

The KL is part of the reward, so it is fixed for the rollout and needs old and reference log-probs before advantages.

With `turn_credit` a token t has the advantage of its turn; L is the sum over tokens of the same with A_t and, in place of the
ratio, `stopgrad(ratio) * exp(logprob_t - stopgrad(logprob_t))`. With equal A_t the gradient is the same.

Different from the paper: the clipped ratio, so that a rollout can serve several steps. On-policy the ratio is 1 and the
gradient is the paper's, REINFORCE's `-A * sum(grad logprob)`.

Shapes: N sequences of the rollout, G of one group; T loss tokens of a micro-batch, B of its sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Advantages, Algorithm, Need
from lowpeak.algorithms.groups import (
    centered,
    constant_per_token,
    indices_by_group,
    reward_metrics,
    select_all,
    select_unequal,
    total_rewards,
    unbiased_std,
)
from lowpeak.algorithms.loss_terms import (
    clipped_surrogate,
    corrected_advantages,
    kl_estimate,
    product_ratio,
    ratio_with_token_gradient,
    repeat_per_token,
    sequence_mean,
    step_weights,
    sum_per_sequence,
    value_per_sequence,
)
from lowpeak.algorithms.metrics import clip_ratios, measure_pass, weighted_tokens
from lowpeak.algorithms.turn_credit import turn_advantages
from lowpeak.arguments import RLOOSettings
from lowpeak.records import Metric, Record, TokenBatch

_STD_EPSILON = 1e-4  # added to a std before it divides


def make_rloo(settings: RLOOSettings) -> Algorithm:
    """Return RLOO; sequences without an advantage are always skipped, since the KL is in the advantage."""
    needs: dict[Need, bool] = {
        "old": settings.needs_old,
        "reference": settings.beta != 0.0,
    }
    return Algorithm(
        name="rloo",
        unit="sequence",
        needs=frozenset(need for need, needed in needs.items() if needed),
        select=select_unequal if settings.drop_equal_groups else select_all,
        advantages=partial(corrected_advantages, settings, partial(rloo_advantages, settings)),
        reduction=sequence_mean,
        loss=partial(rloo_loss, settings),
        measure=partial(measure_rloo, settings),
        skip_zero_advantage=True,
    )


def rloo_advantages(settings: RLOOSettings, records: Sequence[Record]) -> Advantages:
    """Return the advantages of a whole rollout, the same for all tokens of a completion, or of a turn with `turn_credit`.

    With `normalize_advantages` they are divided by their std over the rollout; their mean is zero by construction. A
    sequence without a reward or alone in its group gets 0, and so do all sequences of a group whose rewards are equal.
    """
    rewards_N = total_rewards(records)
    if settings.reward_clip is not None:
        rewards_N = rewards_N.clamp(*settings.reward_clip)
    metrics = reward_metrics(records)
    if settings.beta != 0.0:
        kl_N, metrics["kl"] = _sequence_kl(settings, records)
        rewards_N = rewards_N - settings.beta * kl_N
    advantages_N = torch.full_like(rewards_N, math.nan)
    for group in indices_by_group(records).values():
        advantages_N[group] = leave_one_out(rewards_N[group])
    divisor = unbiased_std(advantages_N) + _STD_EPSILON if settings.normalize_advantages else 1.0
    if settings.turn_credit == "outcome":
        return Advantages(constant_per_token(advantages_N / divisor, records), metrics)
    divisors_N = torch.full_like(rewards_N, divisor) if settings.normalize_advantages else None
    credit = settings.turn_credit, settings.turn_discount
    return Advantages(turn_advantages(*credit, records, rewards_N, leave_one_out, divisors_N), metrics)


def leave_one_out(values_G: Tensor) -> Tensor:
    """Return `v - (sum(values) - v) / (n - 1)` of the n values that are not NaN; NaN for a value without others.

    Computed as `n / (n - 1) * (v - mean(values))`, which is the same.
    """
    num_rewarded = int((~values_G.isnan()).sum())
    return centered(values_G) * (num_rewarded / (num_rewarded - 1) if num_rewarded > 1 else math.nan)


def _sequence_kl(settings: RLOOSettings, records: Sequence[Record]) -> tuple[Tensor, Metric]:
    """Return the KL between old and reference, summed over each sequence's loss tokens [N], and its mean per token."""
    sums, num_tokens = [], 0
    for record in records:
        assert record.old is not None, "a KL in the reward needs old log-probs"
        assert record.reference is not None, "a KL in the reward needs the reference's log-probs"
        mask = record.completion.loss_mask
        kl = kl_estimate(record.old.double(), record.reference.double(), settings.kl_estimator)
        sums.append(kl[mask].sum())
        num_tokens += int(mask.sum())
    kl_N = torch.stack(sums)
    return kl_N, Metric(float(kl_N.sum()), num_tokens)


def rloo_loss(settings: RLOOSettings, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return each sequence's clipped surrogate; with `turn_credit`, the sum of its tokens' surrogates: [B]."""
    ratio_B, clips = product_ratio(logprobs_T, tokens), (settings.clip_low, settings.clip_high)
    if settings.turn_credit == "outcome":
        loss_B = clipped_surrogate(ratio_B, value_per_sequence(tokens.advantages_T, tokens), *clips)
    else:
        ratio_T = ratio_with_token_gradient(repeat_per_token(ratio_B, tokens), logprobs_T)
        loss_B = sum_per_sequence(clipped_surrogate(ratio_T, tokens.advantages_T, *clips), tokens)
    if settings.step_correction is None:
        return loss_B
    return loss_B * value_per_sequence(step_weights(settings.step_correction, logprobs_T, tokens), tokens)


def measure_rloo(
    settings: RLOOSettings, logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch
) -> dict[str, Metric]:
    """Return clip ratios of sequences, entropy and the sampler's drift."""
    mask_T = weighted_tokens(tokens, "sequence")
    ratio_T = repeat_per_token(product_ratio(logprobs_T, tokens), tokens)
    metrics = measure_pass(logprobs_T, entropy_T, tokens, mask_T, settings.step_correction)
    return metrics | clip_ratios(ratio_T, tokens, mask_T, "sequence", settings.clip_low, settings.clip_high)

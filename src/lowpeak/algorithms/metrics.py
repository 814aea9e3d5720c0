"""Metrics of a micro-batch that algorithms share. Each carries its reduction; names are TRL's.

Shapes: T loss tokens of a micro-batch, B of its sequences. Tokens of weight 0 (a rank's masked micro-batch) are in no
metric. The means of `clip_ratio/*` are over the whole step: sequences that were skipped count there as not
clipped. A minimum over nothing is infinity, a maximum 0. No function waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowpeak.algorithms.loss_terms import (
    mean_per_sequence,
    measure_correction,
    old_logprobs,
    repeat_per_token,
    sampler_ratios,
    step_weights,
    sum_per_pair,
    sum_per_sequence,
)
from lowpeak.arguments import Correction, OldPolicy
from lowpeak.records import Metric, TokenBatch, Unit


def measure_pass(
    logprobs_T: Tensor,
    entropy_T: Tensor | None,
    tokens: TokenBatch,
    mask_T: Tensor | None = None,
    correction: Correction | None = None,
    old_policy: OldPolicy = "policy",
) -> dict[str, Metric]:
    """Return the metrics of every policy pass: entropy, distance of sampling from old log-probs in nats, correction.

    Means are over the tokens of `mask_T`; None takes the tokens that have a weight, if the unit is a token. If the sampler's
    log-probs are the old ones, the distance is from the policy's.
    """
    if mask_T is None:
        mask_T = weighted_tokens(tokens, "token")
    metrics = {} if entropy_T is None else {"entropy": masked_mean(entropy_T, mask_T)}
    if tokens.sampling_T is not None:
        old_T = logprobs_T if old_policy == "sampler" else old_logprobs(logprobs_T, tokens)
        drift_T = (old_T - tokens.sampling_T).abs()
        # An engine returns NaN for a token that it could not score. Its drift is unknown, not zero.
        known_T = torch.where(drift_T.isnan(), 0.0, mask_T)
        drift_T = drift_T.nan_to_num(nan=0.0)
        metrics["sampling/sampling_logp_difference/mean"] = masked_mean(drift_T, known_T)
        metrics["sampling/sampling_logp_difference/max"] = Metric((drift_T * known_T).max(), kind="max")
    if correction is not None:
        weights_T = step_weights(correction, logprobs_T, tokens)
        metrics |= measure_correction(weights_T, mask_T, correction.per_sequence, tokens)
    return metrics


def measure_sampler(logprobs_T: Tensor, tokens: TokenBatch, mask_T: Tensor) -> dict[str, Metric]:
    """Return the metrics of a correction for the ratios of the policy to the sampler, whose log-probs are the old ones."""
    return measure_correction(sampler_ratios(logprobs_T, tokens), mask_T, False, tokens)


def measure_top1(is_top1_T: Tensor, tokens: TokenBatch) -> dict[str, Metric]:
    """Return the share of tokens that are the likeliest, at any temperature; of pairs, of the chosen completions' tokens."""
    mask_T = weighted_tokens(tokens, "token" if tokens.pairs_B is None else "pair")
    if tokens.pairs_B is not None:
        mask_T = mask_T * repeat_per_token(sum_per_sequence(tokens.advantages_T, tokens) > 0, tokens)
    return {"mean_token_accuracy": masked_mean(is_top1_T.to(mask_T.dtype), mask_T)}


def measure_completions(
    beta: float,
    weights_T: Tensor,
    sign_B: Tensor,
    mask_B: Tensor,
    logprobs_T: Tensor,
    entropy_T: Tensor | None,
    tokens: TokenBatch,
) -> tuple[dict[str, Metric], Tensor]:
    """Return TRL's metrics of chosen (sign above 0) and rejected completions, and their implicit rewards: [B].

    A completion's reward is `beta * sum(weight * (logprob - reference))`, DPO's.
    """
    assert tokens.reference_T is not None, "an implicit reward needs the reference's log-probs"
    is_chosen_B, is_rejected_B = mask_B * (sign_B > 0), mask_B * (sign_B < 0)
    logprob_B = sum_per_sequence(weights_T * logprobs_T, tokens)
    reward_B = beta * sum_per_sequence(weights_T * (logprobs_T - tokens.reference_T), tokens)
    mask_T = repeat_per_token(mask_B, tokens)
    return {
        **({} if entropy_T is None else {"entropy": masked_mean(entropy_T, mask_T)}),
        "rewards/chosen": masked_mean(reward_B, is_chosen_B),
        "rewards/rejected": masked_mean(reward_B, is_rejected_B),
        "logps/chosen": masked_mean(logprob_B, is_chosen_B),
        "logps/rejected": masked_mean(logprob_B, is_rejected_B),
    }, reward_B


def measure_pairs(beta: float, logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch) -> dict[str, Metric]:
    """Return TRL's metrics of trained pairs, which advantages of +weight and -weight mark."""
    assert tokens.pairs_B is not None, "the unit must be a pair"
    mask_U = (tokens.weights_U > 0).to(logprobs_T.dtype)
    mask_B = mask_U.index_select(0, tokens.pairs_B)
    sign_B = sum_per_sequence(tokens.advantages_T, tokens).sign()
    metrics, reward_B = measure_completions(
        beta, tokens.advantages_T.abs(), sign_B, mask_B, logprobs_T, entropy_T, tokens
    )
    margin_U = sum_per_pair(sign_B * reward_B, tokens)
    return {
        **metrics,
        "rewards/margins": masked_mean(margin_U, mask_U),
        "rewards/accuracies": masked_mean((margin_U > 0).to(mask_U.dtype), mask_U),
    }


def clip_ratios(
    ratio_T: Tensor, tokens: TokenBatch, mask_T: Tensor, unit: Unit, clip_low: float, clip_high: float
) -> dict[str, Metric]:
    """Return the shares of the step's units that the clip silences: below with A < 0, above with A > 0.

    Means are over units; extremes are of sequences.
    """
    low_T = mask_T * ((ratio_T < 1.0 - clip_low) & (tokens.advantages_T < 0))
    high_T = mask_T * ((ratio_T > 1.0 + clip_high) & (tokens.advantages_T > 0))
    low_B, high_B = _clipped_share(low_T, tokens, unit), _clipped_share(high_T, tokens, unit)
    low_U, high_U, share = (
        (low_T, high_T, tokens.token_share) if unit == "token" else (low_B, high_B, tokens.sequence_share)
    )
    has_tokens_B = sum_per_sequence(mask_T, tokens) > 0
    return {
        "clip_ratio/low_mean": mean_over_step(low_U, share, tokens),
        "clip_ratio/low_min": Metric(torch.where(has_tokens_B, low_B, math.inf).min(), kind="min"),
        "clip_ratio/high_mean": mean_over_step(high_U, share, tokens),
        "clip_ratio/high_max": Metric(high_B.max(), kind="max"),
        "clip_ratio/region_mean": mean_over_step(low_U + high_U, share, tokens),
    }


def _clipped_share(clipped_T: Tensor, tokens: TokenBatch, unit: Unit) -> Tensor:
    """Return the share of each sequence's tokens that are clipped: [B]; 0 or 1 if the sequence has one ratio."""
    if unit == "token":
        return mean_per_sequence(clipped_T, tokens)
    # Any clipped token tells: the sampler's correction may set the advantage of some to 0, which hides their sign.
    return sum_per_sequence(clipped_T, tokens).clamp(max=1.0)


def mean_over_step(values: Tensor, share: float, tokens: TokenBatch) -> Metric:
    """Return the mean over all tokens or sequences of the step, each with this share; 0 for those that were skipped."""
    return Metric(values.sum() * share, tokens.batch_share)


def weighted_tokens(tokens: TokenBatch, unit: Unit) -> Tensor:
    """Return 1.0 at tokens whose unit has a weight, else 0.0: [T]."""
    # The shape of the weights does not tell the unit: B can equal T.
    weights_T = tokens.weights_U
    if unit == "pair":
        assert tokens.pairs_B is not None, "the unit must be a pair"
        weights_T = weights_T.index_select(0, tokens.pairs_B)
    if unit != "token":
        weights_T = repeat_per_token(weights_T, tokens)
    return (weights_T > 0).to(weights_T.dtype)


def masked_mean(values: Tensor, mask: Tensor) -> Metric:
    """Return the mean of the values whose mask is 1."""
    return Metric((values * mask).sum(), mask.sum())

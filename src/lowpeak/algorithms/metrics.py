"""Measure: what a micro-batch says about its step, as metrics that carry their own reduction, named as TRL's.

Shapes: T counted tokens of a micro-batch, B of its rows. Tokens of weight 0 (a masked micro-batch) are in no metric.
Rows that were not trained on are in the means of `clip_ratio/*` alone, as what is not clipped. The extremes of no row at all
are 0 and infinity. Nothing waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowpeak.algorithms.importance import importance_ratio, old_logprobs, product_ratio
from lowpeak.algorithms.losses import grpo_kl
from lowpeak.algorithms.rollout_correction import measure_correction, step_weights
from lowpeak.algorithms.segment_ops import over_tokens, row_means, row_sums
from lowpeak.arguments import Correction, GRPOSettings, RLOOSettings
from lowpeak.records import Metric, TokenBatch, Unit


def measure_grpo(
    settings: GRPOSettings, logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch
) -> dict[str, Metric]:
    """Clipping, the loss's KL, entropy and drift of the sampler.

    `cispo_clip_ratio` is the share of tokens above the ceiling with a positive advantage, as in TRL.
    """
    unit: Unit = settings.importance_level
    counted_T = counted_tokens(tokens, unit)
    ratio_T = importance_ratio(logprobs_T, tokens, settings.importance_level)
    metrics = measure_pass(logprobs_T, entropy_T, tokens, counted_T, settings.step_correction)
    if settings.beta != 0.0:
        metrics["kl"] = mean_of(grpo_kl(settings, logprobs_T, ratio_T, tokens), counted_T)
    if settings.loss_type == "cispo":
        high_T = (ratio_T > 1.0 + settings.clip_high) & (tokens.advantages_T > 0)
        metrics["cispo_clip_ratio"] = _mean_of_step(counted_T * high_T, tokens.token_share, tokens)
        return metrics
    assert settings.clip_low is not None, "only CISPO has no lower clip"
    return metrics | _clip_ratios(ratio_T, tokens, counted_T, unit, settings.clip_low, settings.clip_high)


def measure_rloo(
    settings: RLOOSettings, logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch
) -> dict[str, Metric]:
    """Clipping of rows, entropy and drift of the sampler."""
    counted_T = counted_tokens(tokens, "sequence")
    ratio_T = over_tokens(product_ratio(logprobs_T, tokens), tokens)
    metrics = measure_pass(logprobs_T, entropy_T, tokens, counted_T, settings.step_correction)
    return metrics | _clip_ratios(ratio_T, tokens, counted_T, "sequence", settings.clip_low, settings.clip_high)


def measure_supervised(logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch) -> dict[str, Metric]:
    """Entropy, where it is given."""
    return {} if entropy_T is None else {"entropy": mean_of(entropy_T, counted_tokens(tokens, "token"))}


def measure_top1(is_top1_T: Tensor, tokens: TokenBatch) -> dict[str, Metric]:
    """The share of counted tokens that are the likeliest, whatever the temperature."""
    counted_T = counted_tokens(tokens, "token")
    return {"mean_token_accuracy": mean_of(is_top1_T.to(counted_T.dtype), counted_T)}


def measure_pass(
    logprobs_T: Tensor,
    entropy_T: Tensor | None,
    tokens: TokenBatch,
    counted_T: Tensor | None = None,
    correction: Correction | None = None,
) -> dict[str, Metric]:
    """Return the metrics of every policy pass: entropy, the sampler's distance from old log-probs in nats, its correction.

    Means are over the tokens that `counted_T` counts; None counts each token with a weight of its own.
    """
    if counted_T is None:
        counted_T = counted_tokens(tokens, "token")
    metrics = {} if entropy_T is None else {"entropy": mean_of(entropy_T, counted_T)}
    if tokens.sampling_T is not None:
        drift_T = (old_logprobs(logprobs_T, tokens) - tokens.sampling_T).abs()
        # An engine that could not score a token says NaN: no drift is known there, which is not a drift of zero.
        known_T = torch.where(drift_T.isnan(), 0.0, counted_T)
        drift_T = drift_T.nan_to_num(nan=0.0)
        metrics["sampling/sampling_logp_difference/mean"] = mean_of(drift_T, known_T)
        metrics["sampling/sampling_logp_difference/max"] = Metric((drift_T * known_T).max(), kind="max")
    if correction is not None:
        weights_T = step_weights(correction, logprobs_T, tokens)
        metrics |= measure_correction(weights_T, counted_T, correction.per_sequence, tokens)
    return metrics


def _clip_ratios(
    ratio_T: Tensor, tokens: TokenBatch, counted_T: Tensor, unit: Unit, clip_low: float, clip_high: float
) -> dict[str, Metric]:
    """The shares of the step's units that the clip silences: below with A < 0, above with A > 0; extremes are of rows."""
    low_T = counted_T * ((ratio_T < 1.0 - clip_low) & (tokens.advantages_T < 0))
    high_T = counted_T * ((ratio_T > 1.0 + clip_high) & (tokens.advantages_T > 0))
    low_B, high_B = _clipped_share(low_T, tokens, unit), _clipped_share(high_T, tokens, unit)
    low_U, high_U, share = (low_T, high_T, tokens.token_share) if unit == "token" else (low_B, high_B, tokens.row_share)
    counted_B = row_sums(counted_T, tokens) > 0
    return {
        "clip_ratio/low_mean": _mean_of_step(low_U, share, tokens),
        "clip_ratio/low_min": Metric(torch.where(counted_B, low_B, math.inf).min(), kind="min"),
        "clip_ratio/high_mean": _mean_of_step(high_U, share, tokens),
        "clip_ratio/high_max": Metric(high_B.max(), kind="max"),
        "clip_ratio/region_mean": _mean_of_step(low_U + high_U, share, tokens),
    }


def _clipped_share(clipped_T: Tensor, tokens: TokenBatch, unit: Unit) -> Tensor:
    """The share of each row's tokens that are clipped: [B]; of a row with one ratio, 1 if any of its tokens is.

    A correction of the sampler may set the advantage of some of its tokens to 0, which hides the sign.
    """
    return row_means(clipped_T, tokens) if unit == "token" else row_sums(clipped_T, tokens).clamp(max=1.0)


def _mean_of_step(values: Tensor, share: float, tokens: TokenBatch) -> Metric:
    """The mean over the tokens or rows of the whole step, of which one has this share; those that are not trained are 0."""
    return Metric(values.sum() * share, tokens.batch_share)


def counted_tokens(tokens: TokenBatch, unit: Unit) -> Tensor:
    """1.0 at tokens whose unit weighs something: float [T]. The unit is told, since B can equal T by chance."""
    weights_T = tokens.weights_U if unit == "token" else over_tokens(tokens.weights_U, tokens)
    return (weights_T > 0).to(weights_T.dtype)


def mean_of(values: Tensor, counted: Tensor) -> Metric:
    """The mean of what counts."""
    return Metric((values * counted).sum(), counted.sum())

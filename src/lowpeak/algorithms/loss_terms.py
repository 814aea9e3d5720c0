"""Terms that losses share: reductions, importance ratios, the clipped surrogate, KL estimates, and the sampler's correction.

The trained loss is `sum(weights_U * loss_U)` over all units of all ranks, with weights from the counts of the whole step. So
the split into micro-batches never changes it. An algorithm's `reduction` gives the weight of a unit, for N sequences and T
loss tokens in the step and `length` loss tokens in the sequence (or pair). Sequences without loss tokens count in N and
weigh 0.

On-policy (`old_T` is None) every importance ratio is exactly 1, and its gradient is the gradient of the log-prob.

Truncated importance sampling corrects the policy loss for the drift between the sampling engine and the trainer. An engine
with a separate copy of the weights, other kernels or a narrower dtype samples from a slightly different policy. The policy
loss is weighted by the probability of the sampled token under the trainer over that under the engine:

    weight = exp(old - sampled) of a token, or exp(sum(old - sampled)) over a completion's loss tokens
    truncate: clamp the weight to [minimum, maximum]; mask: set it to 0 outside of them
    geometric mask: 1 if exp(mean(old - sampled)) over a completion's loss tokens is within them, else 0

Names and meanings are those of TRL 1.16. The weight has no gradient and does not apply to KL and entropy terms. A token whose
sampling log-prob is unknown (NaN) is not corrected. If old log-probs are scored, the weight is fixed for the rollout and
multiplies the advantages, since the policy term is a product with the advantage. On-policy, old is the policy's log-prob, and
each step forms the weight.

Shapes: T loss tokens of a micro-batch, B of its sequences, U of its pairs, C tokens of one completion. Segment sums never wait
for the device; a sequence without loss tokens gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Advantages, StepCounts
from lowpeak.arguments import Correction, ImportanceLevel, KLEstimator
from lowpeak.records import Metric, Record, TokenBatch

Reduction = Callable[[int, StepCounts], float]


def token_mean(length: int, counts: StepCounts) -> float:
    """Return a token's weight in the mean over the step's tokens: 1 / T."""
    return 1.0 / counts.num_tokens if length else 0.0


def sequence_mean(length: int, counts: StepCounts) -> float:
    """Return a sequence's weight in the mean over sequences: 1 / N; as a token's weight, tokens of a sequence are summed."""
    return 1.0 / counts.num_sequences if length else 0.0


def pair_mean(length: int, counts: StepCounts) -> float:
    """Return a pair's weight in the mean over pairs, which have two sequences each: 2 / N."""
    return 2.0 / counts.num_sequences if length else 0.0


def sum_per_sequence(values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the sum over each sequence's tokens: [B]."""
    return values_T.new_zeros(tokens.num_sequences).index_add(0, tokens.sequences_T, values_T)


def mean_per_sequence(values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the mean over each sequence's tokens: [B]."""
    return sum_per_sequence(values_T, tokens) / sum_per_sequence(torch.ones_like(values_T), tokens).clamp(min=1.0)


def value_per_sequence(values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the value that all tokens of a sequence share: [B], without the rounding of a mean."""
    return values_T.new_zeros(tokens.num_sequences).scatter(0, tokens.sequences_T, values_T)


def repeat_per_token(values_B: Tensor, tokens: TokenBatch) -> Tensor:
    """Return each sequence's value at each of its tokens: [T]."""
    return values_B.index_select(0, tokens.sequences_T)


def sum_per_pair(values_B: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the sum over each pair's two sequences: [U]."""
    assert tokens.pairs_B is not None, "the unit must be a pair"
    return values_B.new_zeros(len(tokens.weights_U)).index_add(0, tokens.pairs_B, values_B)


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


def ratio_with_token_gradient(ratio_T: Tensor, logprobs_T: Tensor) -> Tensor:
    """Return each token's sequence ratio, with the gradient of the token's log-prob (arXiv 2507.18071, section 4.3): [T]."""
    return ratio_T.detach() * torch.exp(logprobs_T - logprobs_T.detach())


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


def off_policy_mask(logprobs_T: Tensor, tokens: TokenBatch, threshold: float) -> Tensor:
    """Return 0 at tokens with a negative advantage whose sequence left the policy that sampled it, else 1: [T].

    A sequence has left it if the mean of `sampled - policy` over its tokens is above `threshold`, in nats (DeepSeek-V3.2,
    arXiv 2512.02556, equation 9). The old log-prob is used for a token whose sampling log-prob is unknown (NaN).
    """
    sampled_T = old_T = old_logprobs(logprobs_T, tokens)
    if tokens.sampling_T is not None:
        sampled_T = torch.where(tokens.sampling_T.isnan(), old_T, tokens.sampling_T)
    drift_B = mean_per_sequence(sampled_T - logprobs_T.detach(), tokens)
    is_kept_T = (tokens.advantages_T >= 0) | repeat_per_token(drift_B <= threshold, tokens)
    return is_kept_T.to(logprobs_T.dtype)


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


_CORRECTION_METRIC = "sampling/importance_sampling_ratio"
_MEAN_SQUARE = f"{_CORRECTION_METRIC}/mean_square"
EFFECTIVE_SIZE = "sampling/effective_sample_size"


class CorrectionSettings(Protocol):
    """Settings of an algorithm that a correction reads."""

    @property
    def rollout_correction(self) -> Correction | None: ...


def correction_weight(correction: Correction, drift: Tensor) -> Tensor:
    """Return `exp(drift)` clamped to the correction's bounds, or 0 outside of them: elementwise, without a gradient.

    Of a geometric mean, whose drift is the mean, 1 within the bounds.
    """
    ratio = bounded_exp(drift.detach())
    if not correction.masks:
        return ratio.clamp(correction.minimum, correction.maximum)
    weight = torch.ones_like(ratio) if correction.geometric else ratio
    if correction.maximum is not None:
        weight = torch.where(ratio > correction.maximum, 0.0, weight)
    if correction.minimum is not None:
        weight = torch.where(ratio < correction.minimum, 0.0, weight)
    return weight


def step_weights(correction: Correction, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return each token's weight in an on-policy step: [T]; 1 if the micro-batch has no sampling log-probs."""
    if tokens.sampling_T is None:
        return torch.ones_like(logprobs_T)
    # Old log-probs may be the sampler's; a geometric mean is the policy's, then and on-policy.
    old_T = logprobs_T.detach() if correction.geometric else old_logprobs(logprobs_T, tokens)
    drift_T = _zero_unknown(old_T - tokens.sampling_T)
    if not correction.per_sequence:
        return correction_weight(correction, drift_T)
    reduce = mean_per_sequence if correction.geometric else sum_per_sequence
    return repeat_per_token(correction_weight(correction, reduce(drift_T, tokens)), tokens)


def sampler_ratios(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return `exp(logprob - sampled)` of each token without a gradient, 1 if it is unknown: [T]."""
    if tokens.sampling_T is None:
        return torch.ones_like(logprobs_T)
    return bounded_exp(_zero_unknown(logprobs_T.detach() - tokens.sampling_T))


def corrected_advantages(
    settings: CorrectionSettings,
    advantages: Callable[[Sequence[Record]], Advantages],
    records: Sequence[Record],
    coefficients: Mapping[str, float],
) -> Advantages:
    """Return `advantages(records)`, times the weights if old log-probs are scored."""
    uncorrected, correction = advantages(records), settings.rollout_correction
    if correction is None:
        return uncorrected
    masks = [record.completion.loss_mask for record in records]
    weights = [_record_weights(correction, *each) for each in zip(records, masks, strict=True)]
    units = [_correction_units(correction, *each) for each in zip(weights, masks, strict=True)]
    per_token = tuple(a * w for a, w in zip(uncorrected.per_token, weights, strict=True))
    metrics = _correction_metrics(*(torch.cat(each) for each in zip(*units, strict=True)))
    return replace(uncorrected, per_token=per_token, metrics={**uncorrected.metrics, **metrics})


def measure_correction(weights_T: Tensor, mask_T: Tensor, per_sequence: bool, tokens: TokenBatch) -> dict[str, Metric]:
    """Return minimum, mean and maximum weight of a micro-batch's tokens, or of its sequences."""
    if per_sequence:
        return _correction_metrics(value_per_sequence(weights_T, tokens), value_per_sequence(mask_T, tokens))
    return _correction_metrics(weights_T, mask_T)


def _record_weights(correction: Correction, record: Record, mask: Tensor) -> Tensor:
    """Return each token's weight from scored log-probs: float32 [C]."""
    assert record.old is not None, "a correction that is fixed for the rollout needs old log-probs"
    drift_C = torch.where(mask, _zero_unknown(record.old.double() - record.completion.logprobs.double()), 0.0)
    if correction.per_sequence:
        drift = drift_C.sum()
        drift_C = (drift / mask.sum().clamp(min=1) if correction.geometric else drift).expand(len(mask))
    return correction_weight(correction, drift_C).float()


def _zero_unknown(drift: Tensor) -> Tensor:
    return torch.where(drift.isnan(), 0.0, drift)


def _correction_units(correction: Correction, weights_C: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return a record's weights and their mask: one entry a token, or one for the whole completion."""
    if not correction.per_sequence:
        return weights_C, mask.float()
    return weights_C[:1], mask.any().float()[None]


def _correction_metrics(weights: Tensor, mask: Tensor) -> dict[str, Metric]:
    return {
        f"{_CORRECTION_METRIC}/min": Metric(torch.where(mask > 0, weights, torch.inf).min(), kind="min"),
        f"{_CORRECTION_METRIC}/mean": Metric((weights * mask).sum(), mask.sum()),
        f"{_CORRECTION_METRIC}/max": Metric(torch.where(mask > 0, weights, 0.0).max(), kind="max"),
        _MEAN_SQUARE: Metric((weights.square() * mask).sum(), mask.sum()),
    }


def with_effective_size(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return metrics over all ranks with `(sum w)^2 / (n sum w^2)` of n weights w, in place of their mean square.

    The share of n samples that would tell as much without weights (Kong 1992); left out if all weights are 0.
    """
    others = {name: metric for name, metric in metrics.items() if name != _MEAN_SQUARE}
    square = metrics[_MEAN_SQUARE].value() if _MEAN_SQUARE in metrics else 0.0
    if square > 0.0:
        others[EFFECTIVE_SIZE] = Metric(metrics[f"{_CORRECTION_METRIC}/mean"].value() ** 2 / square)
    return others

"""Truncated importance sampling: correct the policy loss for the drift between the sampling engine and the trainer.

An engine with a separate copy of the weights, other kernels or a narrower dtype samples from a slightly different policy.
The policy loss is weighted by the probability of the sampled token under the trainer over that under the engine:

    weight = exp(old - sampled) of a token, or exp(sum(old - sampled)) over a completion's loss tokens
    truncate: clamp the weight to [minimum, maximum]; mask: set it to 0 outside of them

Names and meanings are those of TRL 1.16. The weight has no gradient and does not apply to KL and entropy terms. A token whose
sampling log-prob is unknown (NaN) is not corrected. If old log-probs are scored, the weight is fixed for the rollout and
multiplies the advantages, since the policy term is a product with the advantage. On-policy, old is the policy's log-prob, and
each step forms the weight.

Shapes: T loss tokens of a micro-batch, B of its sequences, C tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Advantages
from lowpeak.algorithms.groups import loss_mask
from lowpeak.algorithms.policy_gradient import bounded_exp, old_logprobs
from lowpeak.algorithms.reduction import repeat_per_token, sum_per_sequence, value_per_sequence
from lowpeak.arguments import Correction
from lowpeak.records import Metric, Record, TokenBatch

_METRIC = "sampling/importance_sampling_ratio"


class CorrectionSettings(Protocol):
    """Settings of an algorithm that a correction reads."""

    @property
    def rollout_correction(self) -> Correction | None: ...

    @property
    def mask_truncated(self) -> bool: ...


def correction_weight(correction: Correction, drift: Tensor) -> Tensor:
    """Return `exp(drift)` clamped to the correction's bounds, or 0 outside of them: elementwise, without a gradient."""
    weight = bounded_exp(drift.detach())
    if not correction.masks:
        return weight.clamp(correction.minimum, correction.maximum)
    if correction.maximum is not None:
        weight = torch.where(weight > correction.maximum, 0.0, weight)
    if correction.minimum is not None:
        weight = torch.where(weight < correction.minimum, 0.0, weight)
    return weight


def step_weights(correction: Correction, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return each token's weight in an on-policy step: [T]; 1 if the micro-batch has no sampling log-probs."""
    if tokens.sampling_T is None:
        return torch.ones_like(logprobs_T)
    drift_T = _zero_unknown(old_logprobs(logprobs_T, tokens).detach() - tokens.sampling_T)
    if not correction.per_sequence:
        return correction_weight(correction, drift_T)
    return repeat_per_token(correction_weight(correction, sum_per_sequence(drift_T, tokens)), tokens)


def corrected_advantages(
    settings: CorrectionSettings,
    advantages: Callable[[Sequence[Record]], Advantages],
    records: Sequence[Record],
    state: Mapping[str, float],
) -> Advantages:
    """Return `advantages(records)`, times the weights if old log-probs are scored."""
    uncorrected, correction = advantages(records), settings.rollout_correction
    if correction is None:
        return uncorrected
    masks = [loss_mask(record.completion, settings.mask_truncated) for record in records]
    weights = [_record_weights(correction, *each) for each in zip(records, masks, strict=True)]
    units = [_units(correction, *each) for each in zip(weights, masks, strict=True)]
    per_token = tuple(a * w for a, w in zip(uncorrected.per_token, weights, strict=True))
    metrics = _metrics(*(torch.cat(each) for each in zip(*units, strict=True)))
    return replace(uncorrected, per_token=per_token, metrics={**uncorrected.metrics, **metrics})


def measure_correction(weights_T: Tensor, mask_T: Tensor, per_sequence: bool, tokens: TokenBatch) -> dict[str, Metric]:
    """Return minimum, mean and maximum weight of a micro-batch's tokens, or of its sequences."""
    if per_sequence:
        return _metrics(value_per_sequence(weights_T, tokens), value_per_sequence(mask_T, tokens))
    return _metrics(weights_T, mask_T)


def _record_weights(correction: Correction, record: Record, mask: Tensor) -> Tensor:
    """Return each token's weight from scored log-probs: float32 [C]."""
    assert record.old is not None, "a correction that is fixed for the rollout needs old log-probs"
    drift_C = torch.where(mask, _zero_unknown(record.old.double() - record.completion.logprobs.double()), 0.0)
    if correction.per_sequence:
        drift_C = drift_C.sum().expand(len(mask))
    return correction_weight(correction, drift_C).float()


def _zero_unknown(drift: Tensor) -> Tensor:
    return torch.where(drift.isnan(), 0.0, drift)


def _units(correction: Correction, weights_C: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return a record's weights and their mask: one entry a token, or one for the whole completion."""
    if not correction.per_sequence:
        return weights_C, mask.float()
    return weights_C[:1], mask.any().float()[None]


def _metrics(weights: Tensor, mask: Tensor) -> dict[str, Metric]:
    return {
        f"{_METRIC}/min": Metric(torch.where(mask > 0, weights, torch.inf).min(), kind="min"),
        f"{_METRIC}/mean": Metric((weights * mask).sum(), mask.sum()),
        f"{_METRIC}/max": Metric(torch.where(mask > 0, weights, 0.0).max(), kind="max"),
    }

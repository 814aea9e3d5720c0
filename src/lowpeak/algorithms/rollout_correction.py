"""Truncated importance sampling: an engine with weights of its own, in other kernels or a narrower dtype, samples from a
policy that is not quite the trainer's; the policy loss is weighed by how likely the trainer makes what was sampled over how
likely the engine did.

    weight = exp(old - sampled) of a token, or exp(sum(old - sampled)) over a completion's counted tokens
    truncated: held within [minimum, maximum]; masked: 0 outside of them

Names and meanings are TRL 1.16's. The weight has no gradient, and KL and entropy terms have none of it. A token whose sampling
log-prob is not known (NaN) is not corrected. With old log-probs scored the weight is fixed for the rollout, and since the
policy term is a product with the advantage, it is carried by the advantages. On-policy old is the policy's own log-prob, and
the weight is formed in the step.

Shapes: T counted tokens of a micro-batch, B of its rows, C tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Advantages
from lowpeak.algorithms.group_filter import loss_mask
from lowpeak.algorithms.importance import bounded_exp, old_logprobs
from lowpeak.algorithms.segment_ops import over_tokens, row_sums, row_values
from lowpeak.arguments import Correction
from lowpeak.records import Metric, Record, TokenBatch

_METRIC = "sampling/importance_sampling_ratio"


class Corrected(Protocol):
    """Settings that say whether a correction is fixed for the rollout, and which tokens it counts."""

    @property
    def rollout_correction(self) -> Correction | None: ...

    @property
    def mask_truncated(self) -> bool: ...


def correction_weight(correction: Correction, drift: Tensor) -> Tensor:
    """`exp(drift)` within the correction's bounds, or 0 outside of them: elementwise, without a gradient."""
    weight = bounded_exp(drift.detach())
    if not correction.masks:
        return weight.clamp(correction.minimum, correction.maximum)
    if correction.maximum is not None:
        weight = torch.where(weight > correction.maximum, 0.0, weight)
    if correction.minimum is not None:
        weight = torch.where(weight < correction.minimum, 0.0, weight)
    return weight


def step_weights(correction: Correction, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Each token's weight in an on-policy step: [T]; 1 where the micro-batch has no sampling log-probs."""
    if tokens.sampling_T is None:
        return torch.ones_like(logprobs_T)
    drift_T = _known(old_logprobs(logprobs_T, tokens).detach() - tokens.sampling_T)
    if not correction.per_sequence:
        return correction_weight(correction, drift_T)
    return over_tokens(correction_weight(correction, row_sums(drift_T, tokens)), tokens)


def corrected_advantages(
    settings: Corrected,
    advantages: Callable[[Sequence[Record]], Advantages],
    records: Sequence[Record],
    state: Mapping[str, float],
) -> Advantages:
    """The advantages of `advantages(records)` times their weights, where old log-probs are scored; else as they are."""
    found, correction = advantages(records), settings.rollout_correction
    if correction is None:
        return found
    masks = [loss_mask(record.completion, settings.mask_truncated) for record in records]
    weights = [_record_weights(correction, *pair) for pair in zip(records, masks, strict=True)]
    units = [_units(correction, *pair) for pair in zip(weights, masks, strict=True)]
    per_token = tuple(a * w for a, w in zip(found.per_token, weights, strict=True))
    metrics = _metrics(*(torch.cat(part) for part in zip(*units, strict=True)))
    return replace(found, per_token=per_token, metrics={**found.metrics, **metrics})


def measure_correction(
    weights_T: Tensor, counted_T: Tensor, per_sequence: bool, tokens: TokenBatch
) -> dict[str, Metric]:
    """The least, mean and greatest weight of a micro-batch's counted tokens, or of its rows."""
    if per_sequence:
        return _metrics(row_values(weights_T, tokens), row_values(counted_T, tokens))
    return _metrics(weights_T, counted_T)


def _record_weights(correction: Correction, record: Record, mask: Tensor) -> Tensor:
    """Each token's weight from what is scored: float32 [C]."""
    assert record.old is not None, "a correction that is fixed for the rollout needs old log-probs"
    drift_C = torch.where(mask, _known(record.old.double() - record.completion.logprobs.double()), 0.0)
    if correction.per_sequence:
        drift_C = drift_C.sum().expand(len(mask))
    return correction_weight(correction, drift_C).float()


def _known(drift: Tensor) -> Tensor:
    return torch.where(drift.isnan(), 0.0, drift)


def _units(correction: Correction, weights_C: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A record's weights and which of them count: its tokens', or the one of the whole completion."""
    if not correction.per_sequence:
        return weights_C, mask.float()
    return weights_C[:1], mask.any().float()[None]


def _metrics(weights: Tensor, counted: Tensor) -> dict[str, Metric]:
    return {
        f"{_METRIC}/min": Metric(torch.where(counted > 0, weights, torch.inf).min(), kind="min"),
        f"{_METRIC}/mean": Metric((weights * counted).sum(), counted.sum()),
        f"{_METRIC}/max": Metric(torch.where(counted > 0, weights, 0.0).max(), kind="max"),
    }

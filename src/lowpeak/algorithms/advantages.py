"""Advantages of GRPO's family and of RLOO: one number per row, from the rewards of the whole rollout.

Computed in float64, handed on as float32, the same for all of a row's tokens. Shapes: N rows, G rows of one group,
K reward functions. Standard deviations are unbiased, and 1e-4 is added where one divides.

1. A row that nobody scored (reward NaN) is in no statistic and gets advantage 0; so does a row alone in its group.
2. Where all rewards of a group are equal its advantages are exactly 0, not rounding, so that rows can be skipped.
3. Rows cut off by their length count here, whatever `mask_truncated` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Advantages
from lowpeak.algorithms.entropy import top_entropy_masks
from lowpeak.algorithms.group_filter import all_equal, loss_mask, rows_by_group
from lowpeak.algorithms.kl import kl_estimate
from lowpeak.arguments import GRPOSettings, RLOOSettings
from lowpeak.records import Metric, Record

_EPSILON = 1e-4


def grpo_advantages(settings: GRPOSettings, records: Sequence[Record]) -> Advantages:
    """`(reward - mean(group)) / (std + 1e-4)` (arXiv 2402.03300), or GDPO's normalisation per reward function.

    The std is the group's, the batch's, or absent (`scale_rewards`; none is Dr. GRPO's, arXiv 2503.20783).
    """
    if settings.aggregation == "normalize_then_sum":
        advantages_N = _normalize_then_sum(records, settings.reward_weights)
    else:
        advantages_N = _sum_then_normalize(records, settings.scale_rewards)
    per_token = _expand(advantages_N, records)
    if settings.top_entropy_quantile < 1.0:
        per_token = _only_uncertain(per_token, records, settings.top_entropy_quantile)
    return Advantages(per_token, reward_metrics(records))


def rloo_advantages(settings: RLOOSettings, records: Sequence[Record]) -> Advantages:
    """`r - mean(r of the group's other rows)`, with `r = clip(reward) - beta * sum(KL of counted tokens)`.

    arXiv 2402.14740; the KL is estimated between old and reference. With `normalize_advantages` they are
    divided by their std over the batch; their mean is zero by construction.
    """
    rewards_N = _rewards(records)
    if settings.reward_clip is not None:
        rewards_N = rewards_N.clamp(*settings.reward_clip)
    metrics = reward_metrics(records)
    if settings.beta != 0.0:
        kl_N, metrics["kl"] = _kl_of_rows(settings, records)
        rewards_N = rewards_N - settings.beta * kl_N
    advantages_N = torch.full_like(rewards_N, math.nan)
    for rows in rows_by_group(records).values():
        advantages_N[rows] = leave_one_out(rewards_N[rows])
    if settings.normalize_advantages:
        advantages_N = advantages_N / (spread(advantages_N) + _EPSILON)
    return Advantages(_expand(advantages_N, records), metrics)


def deviation(values: Tensor) -> Tensor:
    """`values - mean(values)` over what is not NaN; exactly 0 where all are equal, NaN stays."""
    return values * 0.0 if all_equal(values.tolist()) else values - values.nanmean()


def spread(values: Tensor) -> float:
    """The unbiased standard deviation of what is not NaN; 0 for fewer than two values or equal ones."""
    return 0.0 if all_equal(values.tolist()) else float(values[~values.isnan()].std())


def leave_one_out(values_G: Tensor) -> Tensor:
    """`v - (sum(values) - v) / (n - 1)` of a group's n values that are not NaN, which is `n / (n - 1) * deviation`.

    A value that has no others is NaN: nothing to compare with.
    """
    num_scored = int((~values_G.isnan()).sum())
    return deviation(values_G) * (num_scored / (num_scored - 1) if num_scored > 1 else math.nan)


def reward_metrics(records: Sequence[Record]) -> dict[str, Metric]:
    """`reward` and `reward_std` over the scored rows, and the share of rows whose group's rewards are all equal.

    All three are of the records' own rewards: before clipping, scaling and KL.
    """
    rewards_N = _rewards(records)
    num_scored = int((~rewards_N.isnan()).sum())
    groups = rows_by_group(records).values()
    num_equal = sum(len(rows) for rows in groups if all_equal(records[i].reward for i in rows))
    return {
        "reward": Metric(float(rewards_N.nansum()), num_scored),
        "reward_std": Metric(spread(rewards_N), 1.0) if num_scored > 1 else Metric(0.0, 0.0),
        "frac_reward_zero_std": Metric(num_equal, len(records)),
    }


def _sum_then_normalize(records: Sequence[Record], scale: str) -> Tensor:
    rewards_N = _rewards(records)
    advantages_N = torch.empty_like(rewards_N)
    for rows in rows_by_group(records).values():
        divisor = spread(rewards_N[rows]) + _EPSILON if scale == "group" else 1.0
        advantages_N[rows] = deviation(rewards_N[rows]) / divisor
    return advantages_N / (spread(rewards_N) + _EPSILON) if scale == "batch" else advantages_N


def _normalize_then_sum(records: Sequence[Record], weights: Sequence[float]) -> Tensor:
    """GDPO (arXiv 2601.05242): each column within its group, weighted sum, then over the batch.

    The batch's mean is not taken off: every column sums to zero in every group, and taking off its rounding would move
    rows that are exactly 0. A function that did not score a row adds nothing to it.
    """
    rewards_NK = torch.tensor([record.rewards for record in records], dtype=torch.float64)
    normal_NK = torch.empty_like(rewards_NK)
    for rows in rows_by_group(records).values():
        for k in range(rewards_NK.shape[1]):
            column_G = rewards_NK[rows, k]
            normal_NK[rows, k] = deviation(column_G) / (spread(column_G) + _EPSILON)
    sums_N = (normal_NK * torch.tensor(weights, dtype=torch.float64)).nansum(dim=1)
    sums_N = sums_N.masked_fill(rewards_NK.isnan().all(dim=1), math.nan)
    return sums_N / (spread(sums_N) + _EPSILON)


def _kl_of_rows(settings: RLOOSettings, records: Sequence[Record]) -> tuple[Tensor, Metric]:
    """Each row's KL summed over its counted tokens, and their mean per counted token."""
    kl_N, num_tokens = [], 0
    for record in records:
        assert record.old is not None, "a KL in the reward needs old log-probs"
        assert record.reference is not None, "a KL in the reward needs the reference's log-probs"
        mask = loss_mask(record.completion, settings.mask_truncated)
        kl = kl_estimate(record.old.double(), record.reference.double(), settings.kl_estimator)
        kl_N.append(kl[mask].sum())
        num_tokens += int(mask.sum())
    rows_kl = torch.stack(kl_N)
    return rows_kl, Metric(float(rows_kl.sum()), num_tokens)


def _only_uncertain(per_token: Sequence[Tensor], records: Sequence[Record], quantile: float) -> tuple[Tensor, ...]:
    """0 for tokens outside the rollout's most uncertain `quantile`: a policy term without advantage is no term."""
    counted = [record.completion.loss_mask for record in records]
    entropies = [
        record.entropy[mask] for record, mask in zip(records, counted, strict=True) if record.entropy is not None
    ]
    assert len(entropies) == len(records), "the top-entropy mask needs every row's entropies"
    masks = top_entropy_masks(entropies, quantile)
    kept = []
    for advantages, mask, uncertain in zip(per_token, counted, masks, strict=True):
        weights = torch.zeros_like(advantages)
        weights[mask] = uncertain.to(weights.dtype)
        kept.append(advantages * weights)
    return tuple(kept)


def _rewards(records: Sequence[Record]) -> Tensor:
    return torch.tensor([record.reward for record in records], dtype=torch.float64)


def _expand(advantages_N: Tensor, records: Sequence[Record]) -> tuple[Tensor, ...]:
    numbers = advantages_N.nan_to_num(nan=0.0).tolist()
    return tuple(torch.full((len(record.completion),), number) for record, number in zip(records, numbers, strict=True))

"""Groups of a rollout: which sequences count, which groups serve its steps, and statistics of their rewards.

Everything is computed on the host from records, in float64. Shapes: N sequences of the rollout, G of one group, C tokens
of one completion. A reward of NaN means that no function rewarded the sequence; statistics leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Advantages, Selection
from lowpeak.records import Completion, Metric, Record

# Weighted sums of the same rewards in another order differ in their last bits. Such a difference teaches nothing.
_ROUNDING = 1e-8


def loss_mask(completion: Completion, mask_truncated: bool) -> Tensor:
    """Return which tokens count in losses and in the KL: bool [C].

    That is the completion's mask, or no token if `mask_truncated` is on and the length limit truncated the completion.
    The sequence's reward counts in its group's statistics either way.
    """
    if mask_truncated and completion.finish_reason == "length":
        return torch.zeros_like(completion.loss_mask)
    return completion.loss_mask


def with_loss_masks(records: Sequence[Record], mask_truncated: bool) -> tuple[Record, ...]:
    """Return the records with the losses' masks, without the extra fields that only rewards read."""
    completions = [
        replace(
            record.completion,
            loss_mask=loss_mask(record.completion, mask_truncated),
            extra={},
            conversation=None,
        )
        for record in records
    ]
    return tuple(replace(record, completion=each) for record, each in zip(records, completions, strict=True))


def indices_by_group(records: Sequence[Record]) -> dict[int, list[int]]:
    """Return the indices of each group's records, groups in the order of their first record."""
    indices: dict[int, list[int]] = {}
    for index, record in enumerate(records):
        indices.setdefault(record.group, []).append(index)
    return indices


def advantages_of_dataset(records: Sequence[Record], coefficients: Mapping[str, float]) -> Advantages:
    """Return advantages and returns that the records have already, from the dataset's reader or the trainer."""
    advantages = tuple(record.advantages for record in records if record.advantages is not None)
    returns = tuple(record.returns for record in records if record.returns is not None)
    assert len(advantages) == len(records), "the dataset's reader sets advantages"
    return Advantages(advantages, {}, returns or None)


def all_equal(rewards: Iterable[float]) -> bool:
    """Return whether the rewards that are not NaN are equal up to rounding; True for fewer than two."""
    rewarded = [reward for reward in rewards if not math.isnan(reward)]
    return len(rewarded) < 2 or max(rewarded) - min(rewarded) <= _ROUNDING


def select_all(records: Sequence[Record]) -> Selection:
    """Select every record."""
    return Selection(tuple(range(len(records))), 0)


def select_unequal(records: Sequence[Record]) -> Selection:
    """Select the groups whose rewards differ: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2).

    A group without a difference, or with fewer than two rewarded sequences, has no advantage and counts as missing.
    """
    groups = indices_by_group(records)
    kept = [group for group in groups.values() if not all_equal(records[i].reward for i in group)]
    return Selection(tuple(sorted(i for group in kept for i in group)), len(groups) - len(kept))


def total_rewards(records: Sequence[Record]) -> Tensor:
    """Return each record's weighted sum of rewards: float64 [N]."""
    return torch.tensor([record.reward for record in records], dtype=torch.float64)


def centered(values: Tensor) -> Tensor:
    """Return `values - mean(values)`; the mean leaves NaN out and NaN stays.

    The result is exactly 0 if all values are equal, so that the sequences can be skipped.
    """
    return values * 0.0 if all_equal(values.tolist()) else values - values.nanmean()


def unbiased_std(values: Tensor) -> float:
    """Return the unbiased standard deviation without NaN; 0 for equal values or fewer than two."""
    return 0.0 if all_equal(values.tolist()) else float(values[~values.isnan()].std())


def constant_per_token(advantages_N: Tensor, records: Sequence[Record]) -> tuple[Tensor, ...]:
    """Repeat each record's advantage over its completion: float32 [C]; 0 for NaN."""
    numbers = advantages_N.nan_to_num(nan=0.0).tolist()
    return tuple(torch.full((len(record.completion),), number) for record, number in zip(records, numbers, strict=True))


def reward_metrics(records: Sequence[Record]) -> dict[str, Metric]:
    """Return `reward`, `reward_std` and `frac_reward_zero_std`, before clipping, scaling and KL; nothing without rewards.

    The first two are over the rewarded sequences; the last is the share of sequences in groups of equal rewards.
    """
    if not any(record.rewards for record in records):
        return {}
    rewards_N = total_rewards(records)
    num_rewarded = int((~rewards_N.isnan()).sum())
    groups = indices_by_group(records).values()
    num_equal = sum(len(group) for group in groups if all_equal(records[i].reward for i in group))
    return {
        "reward": Metric(float(rewards_N.nansum()), num_rewarded),
        "reward_std": Metric(unbiased_std(rewards_N), 1.0) if num_rewarded > 1 else Metric(0.0, 0.0),
        "frac_reward_zero_std": Metric(num_equal, len(records)),
    }

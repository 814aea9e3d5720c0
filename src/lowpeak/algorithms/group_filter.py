"""Select: which of a rollout's rows serve its steps, and which tokens of a row count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Selection
from lowpeak.records import Completion, Record

# Weighted sums of the same rewards in another order differ in their last bits; that is no difference to learn from.
_ROUNDING = 1e-8


def loss_mask(completion: Completion, mask_truncated: bool) -> Tensor:
    """Which tokens count, in losses and in KL: bool [C].

    The completion's own mask, or none when it was cut off by its length and `mask_truncated` is on. The row's reward
    counts in its group's statistics either way.
    """
    if mask_truncated and completion.finish_reason == "length":
        return torch.zeros_like(completion.loss_mask)
    return completion.loss_mask


def rows_by_group(records: Sequence[Record]) -> dict[int, list[int]]:
    """The indices of each group's records, groups in the order of their first record."""
    rows: dict[int, list[int]] = {}
    for index, record in enumerate(records):
        rows.setdefault(record.group, []).append(index)
    return rows


def all_equal(rewards: Iterable[float]) -> bool:
    """Whether the rewards that are not NaN are equal up to rounding, as none and one always are."""
    scored = [reward for reward in rewards if not math.isnan(reward)]
    return len(scored) < 2 or max(scored) - min(scored) <= _ROUNDING


def select_all(records: Sequence[Record]) -> Selection:
    """Every row."""
    return Selection(tuple(range(len(records))), 0)


def select_unequal(records: Sequence[Record]) -> Selection:
    """The rows of groups whose rewards differ: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2).

    A group whose rewards are all equal, or in which at most one row was scored, has no advantage and is missing.
    """
    groups = rows_by_group(records)
    kept = [rows for rows in groups.values() if not all_equal(records[i].reward for i in rows)]
    return Selection(tuple(sorted(i for rows in kept for i in rows)), len(groups) - len(kept))

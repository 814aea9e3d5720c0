"""Which rows and which tokens take part."""

from __future__ import annotations

import math

import pytest
from algorithm_cases import record

from lowpeak.algorithms.select import loss_mask, select_all, select_unequal


def test_all_rows_are_selected_and_no_group_is_missing():
    selection = select_all([record(0, 1.0), record(0, 1.0), record(1, math.nan)])
    assert (selection.rows, selection.num_missing_groups) == ((0, 1, 2), 0)


def test_dynamic_sampling_drops_and_counts_groups_that_teach_nothing():
    nan = math.nan
    rewards = [(0, 1.0), (1, 1.0), (2, nan), (3, 5.0), (0, 1.0), (1, 0.0), (2, nan), (3, nan), (4, 0.1 + 0.2), (4, 0.3)]
    selection = select_unequal([record(group, reward) for group, reward in rewards])
    assert (selection.rows, selection.num_missing_groups) == ((1, 5), 4)


def test_dynamic_sampling_keeps_an_unscored_row_of_a_group_that_teaches():
    selection = select_unequal([record(0, 1.0), record(0, math.nan), record(0, 0.0)])
    assert (selection.rows, selection.num_missing_groups) == ((0, 1, 2), 0)


@pytest.mark.parametrize(
    ("reason", "mask_truncated", "counted"),
    [
        ("length", True, [False, False, False]),
        ("length", False, [True, False, True]),
        ("stop", True, [True, False, True]),
    ],
)
def test_a_truncated_row_counts_no_token_only_when_such_rows_are_masked(reason, mask_truncated, counted):
    completion = record(0, 1.0, length=3, finish_reason=reason).completion
    completion.loss_mask[1] = False
    assert loss_mask(completion, mask_truncated).tolist() == counted
    assert completion.loss_mask.tolist() == [True, False, True]

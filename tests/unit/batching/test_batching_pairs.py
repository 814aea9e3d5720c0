"""Pairs: the two sequences of a group stay in one micro-batch and on one rank, and have one weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batching_cases import make_record

from forest_cases import shared_of
from lowpeak.algorithms.loss_terms import sum_per_pair
from lowpeak.batching.packing import TokenBudget, pack

LAYOUTS = ["padded", "rows", "shared"]


def pairs():
    """Return six pairs of two lengths; the records of a pair are not neighbours."""
    first = [make_record([1, 2, g], range(2 + g), group=g) for g in range(6)]
    second = [make_record([1, 2, g], range(9 - g), group=g) for g in reversed(range(6))]
    return [*first, *second]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_tokens", [1, 16, 30, 1000])
def test_a_pair_is_never_split_whatever_the_budget(layout, max_tokens):
    records = pairs()
    batches = pack(records, range(12), TokenBudget(max_tokens, layout=layout), lambda n: 1.0, unit="pair")
    assert sorted(i for batch in batches for i in batch.record_indices) == list(range(12))
    for batch in batches:
        groups = [records[i].group for i in batch.record_indices]
        assert all(groups.count(group) == 2 for group in groups)
        numbers = {group: int(number) for group, number in zip(groups, batch.tokens.pairs_B, strict=True)}
        assert [numbers[group] for group in groups] == batch.tokens.pairs_B.tolist()
        assert sorted(numbers.values()) == list(range(len(batch.tokens.weights_U)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pair_weighs_by_the_loss_tokens_of_both_sequences(layout):
    records = pairs()
    (batch,) = pack(records, range(12), TokenBudget(1000, layout=layout), float, unit="pair")
    assert batch.tokens.weights_U.tolist() == [11.0] * 6
    lengths = torch.bincount(batch.tokens.sequences_T).double()
    assert sum_per_pair(lengths, batch.tokens).tolist() == [11.0] * 6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pair_is_left_out_if_one_sequence_has_no_loss_token(layout):
    records = [
        make_record([1], range(n), mask, g) for g, n, mask in ((0, 3, None), (0, 2, [0, 0]), (1, 2, None), (1, 4, None))
    ]
    (batch,) = pack(records, range(4), TokenBudget(64, layout=layout), float, unit="pair")
    assert sorted(batch.record_indices) == [2, 3]


def test_a_shared_prompt_is_forwarded_once_per_pair():
    records = [replace(record, prompt_ids=(1, 2, 3)) for record in pairs()]
    (batch,) = pack(records, range(12), TokenBudget(1000, layout="shared"), float, unit="pair")
    assert batch.forest is not None
    assert shared_of(batch.forest) == [3] * 6

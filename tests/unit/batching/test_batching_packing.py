"""Packing into micro-batches loses, doubles and moves no token."""

from __future__ import annotations

import torch
from batching_cases import make_record

from lowpeak.batching.loss_tokens import LossTokens
from lowpeak.batching.packing import TokenBudget, pack, scatter, split_padded


def test_loss_tokens_have_the_index_of_their_sequence_and_their_offset_in_it():
    masks = [(1, 0, 1), (0, 0), (0, 1, 0, 0), (1,)]
    counted = LossTokens.of([make_record([7], range(len(mask)), mask) for mask in masks])
    assert counted.sequences_T.tolist() == [0, 0, 2, 3]
    assert counted.flat_indices_T.tolist() == [0, 2, 6, 9]
    assert counted.offsets_T.tolist() == [0, 2, 1, 0]
    assert counted.counts() == [2, 0, 1, 1]
    assert counted.context_lengths() == [2, 0, 1, 0]  # of a forest: what comes before the last counted token
    nothing = LossTokens.of([])
    assert nothing.counts() == nothing.context_lengths() == nothing.sequences_T.tolist() == []


def test_every_sequence_is_in_exactly_one_micro_batch_within_the_budget():
    lengths = [5, 17, 3, 9, 9, 2, 30, 11]
    batches = split_padded(lengths, TokenBudget(max_tokens=32))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) * max(lengths[i] for i in batch) <= 32


def test_a_sequence_longer_than_the_budget_is_a_separate_micro_batch():
    assert split_padded([50, 3], TokenBudget(max_tokens=10)) == [(0,), (1,)]


def test_padding_to_a_multiple_counts_against_the_budget():
    assert split_padded([5, 5], TokenBudget(max_tokens=10)) == [(0, 1)]
    assert split_padded([5, 5], TokenBudget(max_tokens=10, multiple=8)) == [(0,), (1,)]


def test_positions_are_before_each_loss_token():
    records = [make_record([7, 8], [3, 4, 5], mask=[1, 0, 1]), make_record([9], [6])]
    (batch,) = pack(records, [0, 1], TokenBudget(64, pad_id=0))
    assert batch.input_ids_BL.tolist() == [[7, 8, 3, 4], [9, 0, 0, 0]]
    assert batch.positions_T.tolist() == [1, 3, 4]
    assert batch.targets_T.tolist() == [3, 5, 6]
    assert batch.tokens.sequences_T.tolist() == [0, 0, 1]
    assert batch.tokens.sampling_T.tolist() == [-1.0, -3.0, -1.0]
    assert batch.num_useful == 5


def test_constants_follow_their_tokens_through_sorting():
    values = torch.tensor([0.1, 0.2, 0.3])
    records = [make_record([1], [2], advantages=torch.tensor([9.0])), make_record([1], [3, 4, 5], advantages=values)]
    (batch,) = pack(records, [0, 1], TokenBudget(64), unit_weight=float)
    assert batch.record_indices == (1, 0)
    torch.testing.assert_close(batch.tokens.advantages_T, torch.tensor([0.1, 0.2, 0.3, 9.0]))
    assert batch.tokens.weights_U.tolist() == [3.0, 3.0, 3.0, 1.0]


def test_sequence_units_have_one_weight_per_sequence():
    (batch,) = pack([make_record([1], [2, 3]), make_record([1], [4])], [0, 1], TokenBudget(64), float, unit="sequence")
    assert batch.tokens.weights_U.tolist() == [2.0, 1.0]


def test_sequences_without_a_loss_token_are_left_out():
    assert pack([make_record([1], [2], mask=[0])], [0], TokenBudget(8)) == []


def test_scatter_puts_values_at_loss_tokens_and_zeros_elsewhere():
    record = make_record([1], [2, 3, 4], mask=[0, 1, 1])
    assert scatter(record, torch.tensor([5.0, 6.0])).tolist() == [0.0, 5.0, 6.0]

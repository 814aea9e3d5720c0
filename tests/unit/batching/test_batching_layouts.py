"""Packed layouts: every token at its position, no token that changes no result."""

from __future__ import annotations

import random

import pytest
import torch
from batching_cases import make_record

from forest_cases import draw_branches, rows_of, shared_of, tokens_before
from lowpeak.batching.loss_tokens import num_loss_tokens
from lowpeak.batching.packing import TokenBudget, assign_to_ranks, masked_batch, pack
from lowpeak.records import Node

SHARED, ROWS = TokenBudget(64, layout="shared"), TokenBudget(64, layout="rows")


def draw(seed):
    """Return records of groups and single sequences: completions of one token, with branches, masks with holes, empty masks."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(2, 50) for _ in range(rng.randint(1, 12))] for _ in range(4)]
    records = []
    for prompt in prompts:
        for _ in range(rng.randint(1, 6)):
            ids = [rng.randrange(2, 50) for _ in range(rng.choice([1, 1, 2, 5, 11]))]
            branches = draw_branches(len(prompt), len(ids), torch.Generator().manual_seed(rng.randrange(1 << 30)))
            roots = {branch.start for branch in branches if branch.after < 0}
            mask = [i not in roots and rng.random() < 0.8 for i in range(len(ids))]
            records.append(make_record(prompt, ids, mask, branches=branches if rng.random() < 0.5 else ()))
    rng.shuffle(records)
    return records


def predicted(batch):
    """Return the ids of each sequence of a forest and their positions in the row."""
    ids = batch.input_ids_BL[0].tolist()
    return [([ids[i] for i in row], row) for row in rows_of(batch.forest)]


def test_a_prompt_is_packed_once_and_predicts_every_completions_first_token():
    records = [make_record([7, 8], [3, 4, 5]), make_record([7, 8], [6, 9])]
    (batch,) = pack(records, [0, 1], SHARED)
    assert batch.input_ids_BL.tolist() == [[7, 8, 3, 4, 6]]
    assert batch.forest.nodes == (Node(0, 2), Node(2, 2, 0, 2), Node(4, 1, 0, 2))
    assert batch.forest.position_ids_1L.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.positions_T.tolist() == [1, 2, 3, 1, 4]
    assert batch.targets_T.tolist() == [3, 4, 5, 6, 9]
    assert batch.tokens.sequences_T.tolist() == [0, 0, 0, 1, 1]
    assert batch.record_indices == (0, 1)


def test_plain_sequences_are_concatenated():
    records = [make_record([7, 8], [3, 4, 5]), make_record([7, 8], [6, 9])]
    (batch,) = pack(records, [0, 1], ROWS)
    assert batch.input_ids_BL.tolist() == [[7, 8, 3, 4, 7, 8, 6]]
    assert batch.forest.nodes == (Node(0, 4), Node(4, 3))
    assert batch.positions_T.tolist() == [1, 2, 3, 5, 6]
    assert batch.num_useful == 7 - 2


def test_completions_of_one_token_are_not_branches():
    (batch,) = pack([make_record([7], [3]), make_record([7], [4]), make_record([7], [5, 6])], [0, 1, 2], SHARED)
    assert batch.input_ids_BL.tolist() == [[7, 5]]
    assert batch.forest.nodes == (Node(0, 2),)
    assert batch.positions_T.tolist() == [0, 0, 0, 1]
    (batch,) = pack([make_record([7, 8], [3]), make_record([7, 8], [4])], [0, 1], SHARED)
    assert batch.forest.nodes == (Node(0, 2),)
    assert batch.positions_T.tolist() == [1, 1]


def test_tokens_after_the_last_loss_token_are_left_out():
    (batch,) = pack([make_record([7], [3, 4, 5, 6], mask=[0, 1, 0, 0])], [0], ROWS)
    assert batch.input_ids_BL.tolist() == [[7, 3]]
    assert batch.targets_T.tolist() == [4]


def test_padding_is_at_the_end_and_not_useful():
    (batch,) = pack([make_record([7, 8], [3, 4])], [0], TokenBudget(64, 8, 5, "rows"))
    assert batch.input_ids_BL.tolist() == [[7, 8, 3, 5, 5, 5, 5, 5]]
    assert batch.forest.position_ids_1L.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]]
    assert batch.num_useful == 3


def test_a_different_prompt_keeps_a_sequence_out_of_the_tree():
    records = [make_record([7, 8], [3, 4]), make_record([7, 9], [3, 4]), make_record([7, 8], [5, 6])]
    (batch,) = pack(records, range(3), SHARED)
    assert shared_of(batch.forest) == [2]


def test_a_group_larger_than_the_budget_is_split_with_the_prompt_in_each_part():
    records = [make_record([7] * 6, [3] * 5) for _ in range(8)]
    batches = pack(records, range(8), TokenBudget(20, layout="shared"))
    assert [length for batch in batches for length in shared_of(batch.forest)] == [6, 6, 6]
    assert sum(batch.num_useful for batch in batches) == 6 + 8 * 4
    assert all(batch.input_ids_BL.numel() <= 20 for batch in batches)


def test_a_prompt_without_a_token_is_refused():
    with pytest.raises(AssertionError, match="prompt"):
        pack([make_record([], [3, 4])], [0], ROWS)


@pytest.mark.parametrize("layout", ["shared", "rows"])
@pytest.mark.parametrize(("max_tokens", "multiple"), [(8, 1), (40, 1), (40, 16), (500, 8)])
@pytest.mark.parametrize("seed", range(12))
def test_every_loss_token_is_predicted_from_its_sequence(seed, max_tokens, multiple, layout):
    records = draw(seed)
    budget = TokenBudget(max_tokens, multiple, 0, layout)
    batches = pack(records, range(len(records)), budget)
    seen = sorted(i for batch in batches for i in batch.record_indices)
    assert seen == [i for i, record in enumerate(records) if num_loss_tokens(record)]
    for batch in batches:
        length = batch.input_ids_BL.numel()
        assert length <= max_tokens or len(batch.record_indices) == 1
        assert length % multiple == 0
        sequences = predicted(batch)
        for index, mine in zip(batch.record_indices, range(batch.tokens.num_sequences), strict=True):
            record, where = records[index], records[index].completion.loss_mask.nonzero().flatten()
            positions = batch.positions_T[batch.tokens.sequences_T == mine]
            ids = [*record.prompt_ids, *record.completion.ids.tolist()]
            for position, place in zip(positions.tolist(), where.tolist(), strict=True):
                before = [ids[i] for i in tokens_before(record, len(record.prompt_ids) + place)]
                assert batch.forest.position_ids_1L[0, position] == len(before) - 1
                assert any(
                    tokens[: len(before)] == before and at[len(before) - 1] == position for tokens, at in sequences
                )


@pytest.mark.parametrize("layout", ["shared", "rows", "padded"])
def test_packing_is_deterministic(layout):
    records = draw(3)
    once, again = (pack(records, range(len(records)), TokenBudget(40, layout=layout)) for _ in range(2))
    assert [batch.record_indices for batch in once] == [batch.record_indices for batch in again]


@pytest.mark.parametrize("layout", ["shared", "rows"])
def test_on_skewed_lengths_nearly_every_token_of_a_forest_is_useful(layout):
    rng = random.Random(0)
    prompts = [[group + 2] * 64 for group in range(8)] if layout == "shared" else [[i + 2] * 64 for i in range(64)]
    records = [
        make_record(prompts[i % len(prompts)], [3] * min(256, 1 + int(rng.expovariate(1 / 60)))) for i in range(64)
    ]
    batches = pack(records, range(64), TokenBudget(4096, 8, 0, layout))
    computed = sum(batch.input_ids_BL.numel() for batch in batches)
    assert sum(batch.num_useful for batch in batches) >= 0.95 * computed
    padded = pack(records, range(64), TokenBudget(4096, 8))
    assert sum(batch.input_ids_BL.numel() for batch in padded) > 1.2 * computed


def test_a_zero_weight_batch_has_the_layout_of_the_others():
    for layout in ("padded", "shared", "rows"):
        batch = masked_batch(TokenBudget(8, pad_id=5, layout=layout))
        assert (batch.input_ids_BL.tolist(), batch.record_indices) == ([[5, 5]], ())
        assert batch.tokens.weights_U.sum() == 0
        assert (batch.forest and batch.forest.nodes) == (None if layout == "padded" else (Node(0, 2),))


@pytest.mark.parametrize("unit", ["token", "pair"])
@pytest.mark.parametrize("layout", ["shared", "rows", "padded"])
def test_each_sequence_is_on_one_rank_and_ranks_are_balanced_in_tokens_with_whole_pairs(layout, unit):
    records = [make_record([2 + i // 2], [3] * (40 if i < 2 else 2), group=i // 2) for i in range(12)]
    whole = 2 if unit == "pair" else 1  # the long sequences that stay together
    shares = assign_to_ranks(records, range(2 - whole, 12), TokenBudget(64, layout=layout), 2, unit)
    assert sorted(i for mine in shares for i in mine) == list(range(2 - whole, 12))
    assert sorted(map(len, shares)) == [whole, 10]
    if unit == "pair":
        first, second = ({records[i].group for i in mine} for mine in shares)
        assert not first & second

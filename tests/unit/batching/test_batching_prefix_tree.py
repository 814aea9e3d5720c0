"""Which rows share a prompt, how groups are cut and micro-batches filled: numbers alone."""

from __future__ import annotations

import random

import pytest

from lowpeak.batching import Costs, assign_trees, indices_by_key, pack_bins, plan_trees, split_group

SMALL = Costs.of(hidden=64, intermediate=256)
HALF_A_BILLION = Costs.of(hidden=896, intermediate=4864)


def draw(seed, groups=6, most=9, prompt=40, completion=60):
    """Prompts and completion lengths of a rollout, mixed in order."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(9) for _ in range(rng.randint(1, prompt))) for _ in range(groups)]
    rows = [(prompt, rng.randint(0, completion)) for prompt in prompts for _ in range(rng.randint(1, most))]
    rng.shuffle(rows)
    return [prompt for prompt, _ in rows], [length for _, length in rows]


def test_a_long_prompt_is_shared_and_one_of_three_tokens_is_not():
    assert SMALL.savings(64, [60] * 8) > 0
    assert SMALL.savings(3, [60] * 8) < 0
    assert SMALL.savings(64, [60]) < 0


@pytest.mark.parametrize("costs", [SMALL, HALF_A_BILLION])
@pytest.mark.parametrize(
    ("less", "more"),
    [
        ((64, [60] * 4), (65, [60] * 4)),
        ((64, [60] * 4), (64, [48] * 5)),
        ((64, [61] * 4), (64, [60] * 4)),
    ],
    ids=["a longer prompt", "more rows of as many tokens", "shorter completions"],
)
def test_a_tree_saves_more_with(costs, less, more):
    assert costs.savings(*less) < costs.savings(*more)


def test_a_wider_model_shares_shorter_prompts():
    least = [min(p for p in range(1, 999) if costs.savings(p, [30] * 8) > 0) for costs in (SMALL, HALF_A_BILLION)]
    assert least[0] > least[1] <= 2


def test_rows_share_a_prompt_by_its_ids():
    assert indices_by_key([(1, 2), (3,), (1, 2), (1,)]) == [[0, 2], [1], [3]]


def test_a_group_is_cut_into_the_fewest_balanced_parts():
    assert split_group(10, [5, 5, 5, 5], 30) == [(0, 1, 2, 3)]
    parts = split_group(10, [5, 5, 5, 5], 29)
    assert sorted(len(part) for part in parts) == [2, 2]


def test_a_completion_that_does_not_fit_beside_its_prompt_is_a_part_of_its_own():
    assert split_group(10, [3, 50, 4], 20) == [(0, 2), (1,)]
    assert split_group(30, [3, 5], 20) == [(0,), (1,)]


@pytest.mark.parametrize("capacity", [1, 30, 64, 100, 1000])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("costs", [None, SMALL, HALF_A_BILLION])
def test_every_row_is_in_one_part_that_keeps_the_budget(costs, seed, capacity):
    prompts, completions = draw(seed)
    parts = plan_trees(prompts, completions, capacity, costs)
    assert sorted(row for part in parts for row in part.sequences) == list(range(len(prompts)))
    for part in parts:
        assert len({prompts[row] for row in part.sequences}) == 1
        assert part.prompt == len(prompts[part.sequences[0]])
        assert part.completions == tuple(completions[row] for row in part.sequences)
        assert part.num_tokens <= capacity or len(part.sequences) == 1
    assert parts == plan_trees(prompts, completions, capacity, costs)


@pytest.mark.parametrize("seed", range(20))
def test_filling_loses_nothing_keeps_the_budget_and_opens_few(seed):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 120) for _ in range(rng.randint(1, 60))]
    batches = pack_bins(sizes, 100)
    assert sorted(item for batch in batches for item in batch) == list(range(len(sizes)))
    loads = [sum(sizes[item] for item in batch) for batch in batches]
    assert all(load <= 100 or len(batch) == 1 for load, batch in zip(loads, batches, strict=True))
    assert loads == sorted(loads, reverse=True)
    whole = sum(size for size in sizes if size <= 100)
    least = sum(size > 100 for size in sizes) + -(-whole // 100)
    assert len(batches) <= 11 * least // 9 + 1


def test_micro_batches_are_of_even_size_where_as_many_fit():
    assert [len(batch) for batch in pack_bins([30, 30, 30, 30], 90)] == [2, 2]
    assert pack_bins([], 10) == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_share_every_row_once(seed, world_size):
    prompts, completions = draw(seed)
    shares = assign_trees(prompts, completions, world_size, None)
    assert len(shares) == world_size
    assert sorted(row for share in shares for row in share) == list(range(len(prompts)))
    assert assign_trees([], [], world_size, None) == ((),) * world_size


def test_a_prompts_rows_stay_on_one_rank_while_that_is_balanced():
    prompts = [(group,) * 50 for group in range(4) for _ in range(4)]
    shares = assign_trees(prompts, [10] * 16, 2, None)
    assert [len({prompts[row] for row in share}) for share in shares] == [2, 2]


def test_one_group_is_cut_among_ranks_where_it_would_leave_one_idle():
    shares = assign_trees([(1,) * 5] * 8, [20] * 8, 2, None)
    assert [len(share) for share in shares] == [4, 4]


def test_a_little_imbalance_cuts_no_group():
    prompts, completions = [(1,)] * 4 + [(2,)] * 4, [100] * 4 + [103] * 4
    assert assign_trees(prompts, completions, 2, None) == ((4, 5, 6, 7), (0, 1, 2, 3))

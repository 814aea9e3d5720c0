"""Prefix trees: which sequences share a prompt, how groups are split by capacity and over ranks."""

from __future__ import annotations

import random

import pytest

from lowpeak.batching.prefix_tree import LayerCosts, assign_trees, indices_by_key, plan_trees, split_group

SMALL = LayerCosts.of(hidden=64, intermediate=256)
HALF_A_BILLION = LayerCosts.of(hidden=896, intermediate=4864)


def draw(seed, groups=6, most=9, prompt=40, completion=60):
    """Return prompts and completion lengths of a rollout in random order."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(9) for _ in range(rng.randint(1, prompt))) for _ in range(groups)]
    sequences = [(prompt, rng.randint(0, completion)) for prompt in prompts for _ in range(rng.randint(1, most))]
    rng.shuffle(sequences)
    return [prompt for prompt, _ in sequences], [length for _, length in sequences]


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
    ids=["a longer prompt", "more completions of as many tokens", "shorter completions"],
)
def test_a_tree_saves_more_with(costs, less, more):
    assert costs.savings(*less) < costs.savings(*more)


def test_a_wider_model_shares_shorter_prompts():
    least = [min(p for p in range(1, 999) if costs.savings(p, [30] * 8) > 0) for costs in (SMALL, HALF_A_BILLION)]
    assert least[0] > least[1] <= 2


def test_sequences_share_a_prompt_of_equal_ids():
    assert indices_by_key([(1, 2), (3,), (1, 2), (1,)]) == [[0, 2], [1], [3]]


def test_a_group_is_split_into_the_fewest_balanced_parts():
    assert split_group(10, [5, 5, 5, 5], 30) == [(0, 1, 2, 3)]
    parts = split_group(10, [5, 5, 5, 5], 29)
    assert sorted(len(part) for part in parts) == [2, 2]


def test_a_completion_that_does_not_fit_with_its_prompt_is_a_separate_part():
    assert split_group(10, [3, 50, 4], 20) == [(0, 2), (1,)]
    assert split_group(30, [3, 5], 20) == [(0,), (1,)]


@pytest.mark.parametrize("capacity", [1, 30, 64, 100, 1000])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("costs", [None, SMALL, HALF_A_BILLION])
def test_every_sequence_is_in_one_tree_that_keeps_the_capacity(costs, seed, capacity):
    prompts, completions = draw(seed)
    parts = plan_trees(prompts, completions, capacity, costs)
    assert sorted(i for part in parts for i in part.sequences) == list(range(len(prompts)))
    for part in parts:
        assert len({prompts[i] for i in part.sequences}) == 1
        assert part.prompt == len(prompts[part.sequences[0]])
        assert part.completions == tuple(completions[i] for i in part.sequences)
        assert part.num_tokens <= capacity or len(part.sequences) == 1
    assert parts == plan_trees(prompts, completions, capacity, costs)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_is_assigned_to_one_rank(seed, world_size):
    prompts, completions = draw(seed)
    shares = assign_trees(prompts, completions, world_size, None)
    assert len(shares) == world_size
    assert sorted(i for share in shares for i in share) == list(range(len(prompts)))
    assert assign_trees([], [], world_size, None) == ((),) * world_size


def test_a_group_stays_on_one_rank_if_that_is_balanced():
    prompts = [(group,) * 50 for group in range(4) for _ in range(4)]
    shares = assign_trees(prompts, [10] * 16, 2, None)
    assert [len({prompts[i] for i in share}) for share in shares] == [2, 2]


def test_a_single_group_is_split_over_ranks():
    shares = assign_trees([(1,) * 5] * 8, [20] * 8, 2, None)
    assert [len(share) for share in shares] == [4, 4]


def test_a_small_imbalance_splits_no_group():
    prompts, completions = [(1,)] * 4 + [(2,)] * 4, [100] * 4 + [103] * 4
    assert assign_trees(prompts, completions, 2, None) == ((4, 5, 6, 7), (0, 1, 2, 3))

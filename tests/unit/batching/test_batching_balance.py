"""Load balancing and bin packing lose no item, keep the capacity and are balanced."""

from __future__ import annotations

import random

import pytest

from lowpeak.batching.balance import assign_completions, balanced_partition, pack_bins


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_assignment_covers_every_item_once_and_balances_cost(world_size):
    costs = [9, 1, 8, 2, 7, 3, 6, 4, 5]
    shares = balanced_partition(costs, world_size)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) <= sum(costs) / world_size + max(costs)


def test_more_parts_than_items_leave_some_parts_empty():
    assert balanced_partition([4], 3) == ((0,), (), ())


@pytest.mark.parametrize(("num_groups", "size", "world_size"), [(1, 8, 8), (1, 8, 3), (2, 5, 7), (3, 2, 8), (1, 1, 4)])
def test_each_completion_of_each_group_is_assigned_to_one_rank(num_groups, size, world_size):
    pieces = assign_completions(num_groups, size, world_size)
    assert len(pieces) == world_size
    found = sorted((group, completion) for group, part in pieces for completion in part)
    assert found == [(group, completion) for group in range(num_groups) for completion in range(size)]
    for group in range(num_groups):
        sizes = [len(part) for each, part in pieces if each == group]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_bin_packing_loses_no_item_keeps_the_capacity_and_needs_few_bins(seed):
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


def test_bins_are_balanced_if_the_same_number_suffices():
    assert [len(batch) for batch in pack_bins([30, 30, 30, 30], 90)] == [2, 2]
    assert pack_bins([], 10) == []

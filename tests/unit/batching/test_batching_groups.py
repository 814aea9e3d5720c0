"""Few groups, many ranks: each group's completions are shared out once."""

from __future__ import annotations

import pytest

from lowpeak.batching.assign import cut_groups


@pytest.mark.parametrize(("num_groups", "size", "world_size"), [(1, 8, 8), (1, 8, 3), (2, 5, 7), (3, 2, 8), (1, 1, 4)])
def test_each_completion_of_each_group_is_one_ranks(num_groups, size, world_size):
    pieces = cut_groups(num_groups, size, world_size)
    assert len(pieces) == world_size
    found = sorted((group, completion) for group, part in pieces for completion in part)
    assert found == [(group, completion) for group in range(num_groups) for completion in range(size)]


def test_ranks_of_a_group_have_as_many_completions_to_within_one():
    sizes = [len(part) for _, part in cut_groups(1, 8, 3)]
    assert max(sizes) - min(sizes) <= 1

"""Positions of the blocks of sharded parameters, from which stochastic rounding draws noise."""

from __future__ import annotations

import math
from itertools import product

import pytest

from lowpeak.parallel.checkpoint_state import position_of_block

CASES = {
    "rows": ((6, 4), (3, 1)),
    "columns": ((6, 4), (1, 2)),
    "rows and columns": ((6, 8), (2, 4)),
    "columns of experts": ((4, 3, 6), (1, 1, 3)),
    "rows and the middle of experts": ((4, 6, 5), (2, 3, 1)),
    "uneven columns": ((5, 7), (1, 3)),
    "a vector": ((8,), (4,)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_blocks_of_all_ranks_are_disjoint_ranges_of_positions(case: str) -> None:
    shape, parts = CASES[case]
    bounds = [
        [(size * part // count, size * (part + 1) // count) for part in range(count)]
        for size, count in zip(shape, parts, strict=True)
    ]
    seen: list[int] = []
    for block in product(*bounds):
        start = position_of_block(shape, [last - first for first, last in block], [first for first, _ in block])
        seen += range(start, start + math.prod(last - first for first, last in block))
    assert sorted(seen) == list(range(math.prod(shape)))


def test_a_scalar_is_at_position_0() -> None:
    assert position_of_block((), (), ()) == 0

"""Who does what: rows to ranks, balanced by cost, the same answer on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def assign(costs: Sequence[int], world_size: int) -> tuple[tuple[int, ...], ...]:
    """Indices of `costs` for each rank: the costliest first, each to the rank with the least so far (Graham 1969, LPT).

    Ties go to the lower index and the lower rank, so that every rank computes the same assignment. Indices come back
    in ascending order; a rank may get none.
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + costs[index], rank))
    return tuple(tuple(sorted(share)) for share in shares)


def cut_groups(num_groups: int, size: int, world_size: int) -> tuple[tuple[int, range], ...]:
    """For each rank a group and which of its `size` completions, so that few groups keep many ranks busy.

    Rank r works on group r mod `num_groups`; those of a group share its completions as evenly as they go, some may get none.
    """
    pieces = []
    for rank in range(world_size):
        group, place = rank % num_groups, rank // num_groups
        sharing = len(range(group, world_size, num_groups))
        pieces.append((group, range(size * place // sharing, size * (place + 1) // sharing)))
    return tuple(pieces)

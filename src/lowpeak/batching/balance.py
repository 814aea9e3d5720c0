"""Load balancing: items to ranks and to micro-batches by cost. Deterministic, so that all ranks get the same result."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_partition(costs: Sequence[int], num_parts: int) -> tuple[tuple[int, ...], ...]:
    """Partition items into `num_parts` parts of similar cost: longest processing time first (Graham 1969).

    The costliest item goes first, each to the part with the least cost so far; ties go to the lower index and the lower
    part. Indices are ascending within a part, and a part may be empty.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, part) for part in range(num_parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = heapq.heappop(loads)
        parts[part].append(index)
        heapq.heappush(loads, (load + costs[index], part))
    return tuple(tuple(sorted(part)) for part in parts)


def assign_completions(num_groups: int, size: int, world_size: int) -> tuple[tuple[int, range], ...]:
    """Return for each rank a group and its completions of `size` to generate, so that few groups use many ranks.

    Rank r works on group r mod `num_groups`. The ranks of a group get equally many of its completions, up to one; with more
    ranks than completions some get none.
    """
    assigned = []
    for rank in range(world_size):
        group, place = rank % num_groups, rank // num_groups
        num_sharing = len(range(group, world_size, num_groups))
        assigned.append((group, range(size * place // num_sharing, size * (place + 1) // num_sharing)))
    return tuple(assigned)


def pack_bins(sizes: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Pack items into bins of at most `capacity`, the fullest bin first; a larger item gets a bin to itself.

    First-fit decreasing gives the number of bins (at most 11/9 of the optimum, plus 6/9; Johnson 1973). If as many bins of
    balanced size fit too, these are returned: the largest is smaller then, and with it the peak of memory.
    """
    bins = _first_fit_decreasing(sizes, capacity)
    balanced = balanced_partition(sizes, len(bins)) if bins else ()
    if all(sum(sizes[i] for i in items) <= capacity for items in balanced):
        bins = [list(items) for items in balanced]
    packed = [tuple(sorted(items)) for items in bins]
    return sorted(packed, key=lambda items: (-sum(sizes[i] for i in items), items))


def _first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = next((b for b, room in enumerate(rooms) if sizes[item] <= room), None)
        if place is None:
            bins.append([])
            rooms.append(capacity)
            place = len(bins) - 1
        bins[place].append(item)
        rooms[place] -= sizes[item]
    return bins

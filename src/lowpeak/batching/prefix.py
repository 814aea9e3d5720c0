"""A group's prompt once: which rows share one, and how trees fill micro-batches. Numbers only, the same on every rank.

A row is its prompt (the ids themselves say which rows share one) and the tokens after it that a pass needs. Rows of one
prompt become a tree where that is cheaper than forwarding the prompt once a row.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from lowpeak.batching.balance import assign

Layout = Literal["shared", "rows", "padded"]

# Multiply-adds in the time that a tree costs by itself in one layer (more calls of the attention), and that attending to
# a prompt elsewhere in the row costs per token and unit of width. Fitted on a CPU core to where trees begin to win: widths
# 64 to 512, prompts of 2 to 16 tokens, completions of 8 and 64. What is near that point costs the same either way.
_TREE = 2e6
_MERGE = 200.0
# Cutting groups among ranks must lower the largest load by this share to be worth a prompt more.
_WORTH = 0.05


@dataclass(frozen=True)
class Costs:
    """What one layer takes, in multiply-adds: a token, a pair of tokens of which one sees the other, trees' own work."""

    token: float
    pair: float
    merge: float
    tree: float

    @classmethod
    def of(cls, hidden: int, intermediate: int) -> Costs:
        """Of a decoder layer: 4 D^2 + 3 D I a token, 2 D a pair (scores and values; Kaplan et al. 2020, table 1)."""
        return cls(4.0 * hidden * hidden + 3.0 * hidden * intermediate, 2.0 * hidden, _MERGE * hidden, _TREE)

    def saved(self, prompt: int, completions: Sequence[int]) -> float:
        """Multiply-adds a layer that a tree saves over plain rows; negative where rows are cheaper.

        All but one of the prompt's passes, (G - 1) (token P + pair P^2 / 2), less tree + merge * sum of completions.
        """
        again = (len(completions) - 1) * (self.token * prompt + self.pair * prompt * prompt / 2)
        return again - self.tree - self.merge * sum(completions)


@dataclass(frozen=True)
class Part:
    """Rows of one prompt that are forwarded together: which they are, and how many tokens of each follow the prompt."""

    rows: tuple[int, ...]
    prompt: int
    completions: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the tree."""
        return self.prompt + sum(self.completions)


def grouped(keys: Sequence[Hashable]) -> list[list[int]]:
    """Rows of the same key (prompts of the same ids, a pair's number), in the order of their first row."""
    rows: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return list(rows.values())


def shared_parts(
    prompts: Sequence[tuple[int, ...]], completions: Sequence[int], capacity: int, costs: Costs | None
) -> list[Part]:
    """Rows of one prompt as parts of at most `capacity` tokens that each carry it, and plain rows where that is cheaper.

    `costs` None shares whatever can be shared. Each row is in exactly one part.
    """
    parts: list[Part] = []
    for group in grouped(prompts):
        prompt, lengths = len(prompts[group[0]]), [completions[row] for row in group]
        for cut in cut_group(prompt, lengths, capacity):
            parts += _together(prompt, [group[i] for i in cut], [lengths[i] for i in cut], costs)
    return parts


def _together(prompt: int, rows: Sequence[int], completions: Sequence[int], costs: Costs | None) -> list[Part]:
    if len(rows) > 1 and (costs is None or costs.saved(prompt, completions) > 0):
        return [Part(tuple(rows), prompt, tuple(completions))]
    return [Part((row,), prompt, (length,)) for row, length in zip(rows, completions, strict=True)]


def cut_group(prompt: int, completions: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """A group as few parts, balanced in tokens, that fit `capacity` with the prompt in each of them.

    A completion is never cut: one that does not fit beside its prompt is a part of its own.
    """
    room = capacity - prompt
    fitting = [i for i, length in enumerate(completions) if length <= room]
    alone: list[tuple[int, ...]] = [(i,) for i, length in enumerate(completions) if length > room]
    if not fitting:
        return alone
    lengths = [completions[i] for i in fitting]
    num_parts = max(1, -(-sum(lengths) // max(1, room)))
    shares = assign(lengths, num_parts)
    while max(sum(lengths[j] for j in share) for share in shares) > room:
        num_parts += 1
        shares = assign(lengths, num_parts)
    return [tuple(fitting[j] for j in share) for share in shares if share] + alone


def fill(sizes: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Items of `sizes` as micro-batches of at most `capacity`, the largest first; a larger item is one of its own.

    First-fit decreasing says how many are enough (at most 11/9 of the fewest, and 6/9; Johnson 1973); where as many of
    even size fit as well, these are taken: the largest is smaller then, and with it the peak of memory.
    """
    bins = _first_fit(sizes, capacity)
    even = assign(sizes, len(bins)) if bins else ()
    if all(sum(sizes[i] for i in share) <= capacity for share in even):
        bins = [list(share) for share in even]
    filled = [tuple(sorted(items)) for items in bins]
    return sorted(filled, key=lambda items: (-sum(sizes[i] for i in items), items))


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Each item, the largest first, in the first bin that has room for it; a new one where none has."""
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


def assign_rows(
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[int],
    world_size: int,
    costs: Costs | None,
) -> tuple[tuple[int, ...], ...]:
    """Rows for each rank, balanced in tokens, a prompt's rows together as far as that keeps the balance.

    Groups are cut into 1, 2, 4, ... pieces as long as that lowers the largest rank's tokens, shared prompts counted
    once, by more than a twentieth.
    """
    groups = grouped(prompts)
    largest_group = max((len(group) for group in groups), default=0)
    best: tuple[tuple[int, ...], ...] = ((),) * world_size
    least, pieces = float("inf"), 1
    while pieces < 2 * largest_group:
        cuts = [cut for group in groups for cut in _pieces(group, completions, pieces)]
        loads = [_tokens(prompts, completions, cut, costs) for cut in cuts]
        shares = assign(loads, world_size)
        largest = max(sum(loads[c] for c in share) for share in shares)
        if largest < least * (1 - _WORTH):
            best, least = tuple(tuple(sorted(row for c in share for row in cuts[c])) for share in shares), largest
        pieces *= 2
    return best


def _pieces(group: Sequence[int], completions: Sequence[int], number: int) -> list[list[int]]:
    shares = assign([completions[row] for row in group], min(number, len(group)))
    return [[group[i] for i in share] for share in shares if share]


def _tokens(
    prompts: Sequence[tuple[int, ...]], completions: Sequence[int], rows: Sequence[int], c: Costs | None
) -> int:
    parts = _together(len(prompts[rows[0]]), rows, [completions[row] for row in rows], c)
    return sum(part.num_tokens for part in parts)

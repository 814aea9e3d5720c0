"""Prefix trees: sequences of one prompt that forward it once. A sequence that shares nothing is a tree with one completion.

The functions here decide which sequences form a tree, and split trees by capacity and over ranks. They work on numbers: the
prompts' ids (equal ids share) and how many tokens of each completion a pass forwards. They are deterministic, so that all ranks
get the same result.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from lowpeak.batching.balance import balanced_partition

Layout = Literal["shared", "rows", "padded"]

# Multiply-adds in the time that a tree costs by itself in one layer (more calls of the attention), and that attending to
# a prompt elsewhere in the row costs per token and unit of width. Fitted on a CPU core to where trees begin to win: widths
# 64 to 512, prompts of 2 to 16 tokens, completions of 8 and 64. What is near that point costs the same either way.
_TREE = 2e6
_MERGE = 200.0
# Splitting groups over ranks forwards prompts more often. It must lower the largest load by more than this share.
_MIN_GAIN = 0.05


@dataclass(frozen=True)
class LayerCosts:
    """Multiply-adds of one layer: per token, per pair of tokens of which one sees the other, and of a tree."""

    token: float
    pair: float
    merge: float
    tree: float

    @classmethod
    def of(cls, hidden: int, intermediate: int) -> LayerCosts:
        """Return the costs of a decoder layer: 4 D^2 + 3 D I a token, 2 D a pair (Kaplan et al. 2020, table 1).

        The cost of a pair is that of scores and values.
        """
        return cls(4.0 * hidden * hidden + 3.0 * hidden * intermediate, 2.0 * hidden, _MERGE * hidden, _TREE)

    def savings(self, prompt: int, completions: Sequence[int]) -> float:
        """Return the multiply-adds a layer that a tree saves over plain sequences; negative if those are cheaper.

        All but one of the prompt's passes, (G - 1) (token P + pair P^2 / 2), less tree + merge * sum of completions.
        """
        repeated = (len(completions) - 1) * (self.token * prompt + self.pair * prompt * prompt / 2)
        return repeated - self.tree - self.merge * sum(completions)


@dataclass(frozen=True)
class TreePlan:
    """Sequences that form one tree, by index, and how many tokens of the prompt and of each completion it has."""

    sequences: tuple[int, ...]
    prompt: int
    completions: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.prompt + sum(self.completions)


def indices_by_key(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of equal keys together, in the order of their first index."""
    indices: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        indices.setdefault(key, []).append(index)
    return list(indices.values())


def plan_trees(
    prompts: Sequence[tuple[int, ...]], completions: Sequence[int], capacity: int, costs: LayerCosts | None
) -> list[TreePlan]:
    """Plan trees of at most `capacity` tokens, and plain sequences if `costs` finds them cheaper.

    None shares every prompt that can be shared. Each sequence is in exactly one tree.
    """
    trees: list[TreePlan] = []
    for group in indices_by_key(prompts):
        prompt, lengths = len(prompts[group[0]]), [completions[i] for i in group]
        for part in split_group(prompt, lengths, capacity):
            trees += _one_tree_or_many(prompt, [group[i] for i in part], [lengths[i] for i in part], costs)
    return trees


def _one_tree_or_many(
    prompt: int, sequences: Sequence[int], completions: Sequence[int], costs: LayerCosts | None
) -> list[TreePlan]:
    """Return one tree of all sequences of a prompt, or a tree for each if that is cheaper."""
    if len(sequences) > 1 and (costs is None or costs.savings(prompt, completions) > 0):
        return [TreePlan(tuple(sequences), prompt, tuple(completions))]
    return [TreePlan((i,), prompt, (length,)) for i, length in zip(sequences, completions, strict=True)]


def split_group(prompt: int, completions: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Split a group into few parts, balanced in tokens, that fit `capacity` together with the prompt.

    A completion is never split: one that does not fit with its prompt is a separate part.
    """
    room = capacity - prompt
    fitting = [i for i, length in enumerate(completions) if length <= room]
    too_long: list[tuple[int, ...]] = [(i,) for i, length in enumerate(completions) if length > room]
    if not fitting:
        return too_long
    lengths = [completions[i] for i in fitting]
    num_parts = max(1, -(-sum(lengths) // max(1, room)))
    parts = balanced_partition(lengths, num_parts)
    while max(sum(lengths[j] for j in part) for part in parts) > room:
        num_parts += 1
        parts = balanced_partition(lengths, num_parts)
    return [tuple(fitting[j] for j in part) for part in parts if part] + too_long


def assign_trees(
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[int],
    world_size: int,
    costs: LayerCosts | None,
) -> tuple[tuple[int, ...], ...]:
    """Assign sequences to ranks, balanced in tokens, with a group on one rank as far as the balance allows.

    Groups are split into 1, 2, 4, ... parts as long as that lowers the largest rank's tokens, with shared prompts counted
    once, by more than a twentieth.
    """
    groups = indices_by_key(prompts)
    largest_group = max(map(len, groups), default=0)
    best: tuple[tuple[int, ...], ...] = ((),) * world_size
    least, num_parts = float("inf"), 1
    while num_parts < 2 * largest_group:
        parts = [part for group in groups for part in _balanced_parts(group, completions, num_parts)]
        loads = [_num_forwarded(prompts, completions, part, costs) for part in parts]
        per_rank = balanced_partition(loads, world_size)
        largest = max(sum(loads[p] for p in rank) for rank in per_rank)
        if largest < least * (1 - _MIN_GAIN):
            best, least = (
                tuple(tuple(sorted(chain.from_iterable(parts[p] for p in rank))) for rank in per_rank),
                largest,
            )
        num_parts *= 2
    return best


def _balanced_parts(group: Sequence[int], completions: Sequence[int], num_parts: int) -> list[list[int]]:
    parts = balanced_partition([completions[i] for i in group], min(num_parts, len(group)))
    return [[group[j] for j in part] for part in parts if part]


def _num_forwarded(
    prompts: Sequence[tuple[int, ...]], completions: Sequence[int], sequences: Sequence[int], costs: LayerCosts | None
) -> int:
    """Return how many tokens a forward of these sequences of one prompt has."""
    trees = _one_tree_or_many(len(prompts[sequences[0]]), sequences, [completions[i] for i in sequences], costs)
    return sum(tree.num_tokens for tree in trees)

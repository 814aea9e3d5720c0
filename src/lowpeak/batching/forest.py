"""Forests: parts of rows laid one after another in a single row of ids, without padding between them.

What nothing needs is not laid: no token from a completion's last counted one on predicts anything that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowpeak.records import Forest, Record, Tree


@dataclass(frozen=True)
class Sprout:
    """One row of a tree: its record and the places [T_row] of its counted tokens in the completion, ascending."""

    record: Record
    counted: Tensor

    @property
    def num_needed(self) -> int:
        """Tokens of the completion that a pass forwards: those before the last counted one, none where none counts."""
        return int(self.counted[-1]) if self.counted.numel() else 0


@dataclass(frozen=True)
class Planted:
    """A row of trees: ids [1, L], positions [T] that predict the counted tokens, and what the attention is told."""

    input_ids_1L: Tensor
    positions_T: Tensor
    forest: Forest
    num_tokens: int  # that are no padding


def plant(parts: Sequence[Sequence[Sprout]], padded: Callable[[int], int], pad_id: int) -> Planted:
    """Trees one after another, then padding up to a length of `padded`; rows of a part share its first row's prompt.

    The first token of every completion is predicted by the prompt's last position, so `positions_T` repeats it; a
    prompt has at least one token, therefore.
    """
    ids, position_ids, positions, trees, start = [], [], [], [], 0
    for part in parts:
        prompt_ids = part[0].record.prompt_ids
        assert prompt_ids, "a prompt has at least one token: it predicts the completion's first"
        ids.append(torch.tensor(prompt_ids, dtype=torch.int64))
        position_ids.append(torch.arange(len(prompt_ids)))
        offset = start + len(prompt_ids)
        for sprout in part:
            ids.append(sprout.record.completion.ids[: sprout.num_needed].to(torch.int64))
            position_ids.append(torch.arange(len(prompt_ids), len(prompt_ids) + sprout.num_needed))
            before = offset - 1 + sprout.counted
            positions.append(before.where(sprout.counted > 0, start + len(prompt_ids) - 1))
            offset += sprout.num_needed
        trees.append(_tree(start, len(prompt_ids), [sprout.num_needed for sprout in part]))
        start = offset
    num_padding = padded(start) - start
    ids.append(torch.full((num_padding,), pad_id, dtype=torch.int64))
    position_ids.append(torch.zeros(num_padding, dtype=torch.int64))
    forest = Forest(tuple(trees), torch.cat(position_ids)[None])
    return Planted(torch.cat(ids)[None], torch.cat(positions), forest, start)


def _tree(start: int, prompt: int, completions: Sequence[int]) -> Tree:
    """A completion of which nothing is needed is no branch, and what has one branch only is a plain sequence."""
    branches = tuple(length for length in completions if length)
    if len(branches) < 2:
        return Tree(start, 0, (prompt + sum(branches),))
    return Tree(start, prompt, branches)

"""Forests: parts of rows laid one after another in a single row of ids, without padding between them.

What nothing needs is not laid: no token from a completion's last counted one on predicts anything that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowpeak.batching.loss_tokens import CountedTokens
from lowpeak.records import Forest, Record, Tree


@dataclass(frozen=True)
class Laid:
    """Rows as a model takes them: ids, positions that predict the counted tokens, the forest if they are one."""

    input_ids_BL: Tensor
    positions_T: Tensor
    forest: Forest | None
    num_tokens: int  # that are no padding


def plant(
    rows: Sequence[Record],
    counted: CountedTokens,
    part_sizes: Sequence[int],
    padded: Callable[[int], int],
    pad_id: int,
) -> Laid:
    """Trees one after another, then padding up to a length of `padded`; rows of a part share its first row's prompt.

    The parts are the first rows, the next ones and so on, `part_sizes` each. The first token of every completion is
    predicted by the prompt's last position, so `positions_T` repeats it; a prompt has at least one token, therefore.
    """
    remaining = iter(zip(rows, counted.needed(), strict=True))
    ids: list[Tensor] = []
    position_ids: list[int] = []
    before: list[tuple[int, int]] = []  # of each row: its prompt's last position, and the one before its completion
    trees: list[Tree] = []
    for size in part_sizes:
        part = [next(remaining) for _ in range(size)]
        prompt_ids, start = part[0][0].prompt_ids, len(position_ids)
        assert prompt_ids, "a prompt has at least one token: it predicts the completion's first"
        ids.append(torch.tensor(prompt_ids))
        position_ids += range(len(prompt_ids))
        end = len(position_ids) - 1
        for row, num_needed in part:
            before.append((end, len(position_ids) - 1))
            ids.append(row.completion.ids[:num_needed])
            position_ids += range(len(prompt_ids), len(prompt_ids) + num_needed)
        trees.append(_tree(start, len(prompt_ids), [num_needed for _, num_needed in part]))
    num_tokens = len(position_ids)
    padding = [0] * (padded(num_tokens) - num_tokens)
    ids.append(torch.tensor([pad_id] * len(padding), dtype=torch.int64))
    ends_T, starts_T = torch.tensor(before)[counted.rows_T].unbind(-1)
    positions_T = torch.where(counted.columns_T > 0, starts_T + counted.columns_T, ends_T)
    forest = Forest(tuple(trees), torch.tensor([position_ids + padding]))
    return Laid(torch.cat(ids)[None], positions_T, forest, num_tokens)


def _tree(start: int, prompt: int, completions: Sequence[int]) -> Tree:
    """A completion of which nothing is needed is no branch, and what has one branch only is a plain sequence."""
    branches = tuple(length for length in completions if length)
    if len(branches) < 2:
        return Tree(start, 0, (prompt + sum(branches),))
    return Tree(start, prompt, branches)

"""The sequences of a forest, by the indices of their tokens in its row, and who attends to whom as one number per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowpeak.records import Node


def prefixes(nodes: Sequence[Node]) -> list[list[int]]:
    """Return the tokens, by index in the row, that precede each node in its sequences."""
    found: list[list[int]] = []
    for node in nodes:
        found.append([] if node.parent < 0 else [*found[node.parent], *nodes[node.parent].tokens])
    return found


def paths(nodes: Sequence[Node]) -> list[list[int]]:
    """Return the tokens of each sequence, by index in the row: from a tree's first to the last of a leaf."""
    parents = {node.parent for node in nodes}
    found = enumerate(zip(prefixes(nodes), nodes, strict=True))
    return [[*prefix, *node.tokens] for index, (prefix, node) in found if index not in parents]


def token_ends(nodes: Sequence[Node], length: int) -> Tensor:
    """Return the end of each token's node's subtree, int32 [length]: token i attends to token j if j <= i < end[j].

    Padding is a tree of its own, so that every token attends to some token.
    """
    ends = [node.tokens.stop for node in nodes]
    for index in reversed(range(len(nodes))):
        parent = nodes[index].parent
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[index])
    counts = [node.length for node in nodes]
    counts_N = torch.tensor([*counts, length - sum(counts)])
    # With `output_size` the counts are not read from fake tensors.
    return torch.tensor([*ends, length], dtype=torch.int32).repeat_interleave(counts_N, output_size=length)

"""The mask of attention over a forest, which defines the fast paths."""

from __future__ import annotations

import torch
from torch import Tensor

from lowpeak.records import Forest


def forest_mask(forest: Forest, length: int, device: torch.device | str | None = None) -> Tensor:
    """Return whether packed token i attends to token j: bool [L, L]; False in rows and columns of padding.

    As an additive mask, `zeros.masked_fill(~mask, -inf)`, it runs a forest through any attention, in O(L^2). Let padding
    attend to something then: softmax over nothing is NaN.
    """
    mask_LL = torch.zeros(length, length, dtype=torch.bool, device=device)
    for tree in forest.trees:
        prompt = slice(tree.start, tree.start + tree.prompt)
        mask_LL[prompt, prompt] = _causal(tree.prompt, device)
        start = prompt.stop
        for tokens in tree.completions:
            completion = slice(start, start + tokens)
            mask_LL[completion, prompt] = True
            mask_LL[completion, completion] = _causal(tokens, device)
            start = completion.stop
    return mask_LL


def _causal(length: int, device: torch.device | str | None) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()

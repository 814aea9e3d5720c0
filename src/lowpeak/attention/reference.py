"""What attention over a forest means: the naive mask that the fast ways are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from lowpeak.records import Forest


def forest_mask(forest: Forest, length: int, device: torch.device | str | None = None) -> Tensor:
    """Bool [L, L]: whether token i of the row sees token j; rows and columns of padding are False.

    As an additive mask, `zeros.masked_fill(~mask, -inf)`, it runs a forest through any attention at the cost of the
    whole row's square; a row of padding then sees nothing and must be given something to see.
    """
    mask_LL = torch.zeros(length, length, dtype=torch.bool, device=device)
    for tree in forest.trees:
        prompt = slice(tree.start, tree.start + tree.prompt)
        mask_LL[prompt, prompt] = _causal(tree.prompt, device)
        start = prompt.stop
        for tokens in tree.completions:
            own = slice(start, start + tokens)
            mask_LL[own, prompt] = True
            mask_LL[own, own] = _causal(tokens, device)
            start = own.stop
    return mask_LL


def _causal(length: int, device: torch.device | str | None) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()

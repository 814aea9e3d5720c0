"""Completions of scripted lengths from either side's generation, of a real model whose every forward is computed in full.

A hook replaces what the model says by counting: after START comes a length n, and after n comes n - 1, down to the end
of the sequence, which is 1. Our side draws the first tokens, each row of a group its own; the peer's rows are given the
lengths that ours drew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.shapes import LONGEST, VOCABULARY

CERTAIN = 1e4  # added to the score of the only token that may come


def length_scores(vocabulary: int = VOCABULARY, longest: int = LONGEST) -> Tensor:
    """Scores [V] of the first token n: lengths are exponential with a mean of a quarter of the longest, cut there."""
    scores_V, mean = torch.full((vocabulary,), -CERTAIN), longest / 4
    lengths = torch.arange(1, longest)
    scores_V[lengths] = -lengths / mean
    tail = torch.exp(torch.tensor(-longest / mean)) / (1 - torch.exp(torch.tensor(-1 / mean)))
    scores_V[longest] = tail.log()
    return scores_V


class Counting:
    """A forward hook (with keywords) under which a model counts down; `lengths` are the rows' first tokens where given."""

    def __init__(self, first_V: Tensor | None = None) -> None:
        self.lengths: Tensor | None = None
        self._first_V = length_scores() if first_V is None else first_V
        self._start = len(self._first_V) - 1

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Change the scores [N, V] of the newest token of each row in place, where the model gives logits."""
        if getattr(output, "logits", None) is None:
            return
        newest_N = kwargs["input_ids"][:, -1]
        logits_NV = output.logits[:, -1]
        following_N1 = (newest_N - 1).clamp(min=0)[:, None]
        starts_N = newest_N == self._start
        if self.lengths is not None:
            following_N1 = torch.where(starts_N[:, None], self.lengths[:, None], following_N1)
        elif starts_N.any():
            logits_NV[starts_N] = self._first_V
            following_N1 = torch.where(starts_N[:, None], self._start, following_N1)
            logits_NV[:, self._start] -= CERTAIN * starts_N
        logits_NV.scatter_add_(-1, following_N1, torch.full(following_N1.shape, CERTAIN))

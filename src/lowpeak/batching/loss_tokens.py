"""The tokens of several rows that the loss counts, found at once: a rollout of short rows has hundreds of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowpeak.records import Record


@dataclass(frozen=True)
class CountedTokens:
    """T tokens of R rows, in the rows' order and ascending in each."""

    rows_T: Tensor  # which of the rows
    places_T: Tensor  # where in the rows' completions laid end to end
    columns_T: Tensor  # where in its own completion, which is how many of its tokens come before
    num_rows: int

    @classmethod
    def of(cls, rows: Sequence[Record]) -> CountedTokens:
        """Those of these rows."""
        lengths_R = torch.tensor([len(row.completion) for row in rows], dtype=torch.int64)
        starts_R = lengths_R.cumsum(0) - lengths_R
        masks = [torch.zeros(0, dtype=torch.bool), *(row.completion.loss_mask for row in rows)]
        places_T = torch.cat(masks).nonzero().flatten()
        rows_T = torch.arange(len(rows)).repeat_interleave(lengths_R)[places_T]
        return cls(rows_T, places_T, places_T - starts_R[rows_T], len(rows))

    def counts(self) -> list[int]:
        """How many each row has."""
        return torch.bincount(self.rows_T, minlength=self.num_rows).tolist()

    def needed(self) -> list[int]:
        """Tokens of each completion that a forest forwards: those before its last counted one, none where none counts."""
        return (
            torch.zeros(self.num_rows, dtype=torch.int64)
            .scatter_reduce(0, self.rows_T, self.columns_T, "amax")
            .tolist()
        )


def num_counted(record: Record) -> int:
    """How many tokens of the completion the loss counts."""
    return int(record.completion.loss_mask.count_nonzero())

"""Indices of the loss tokens of several sequences: the tokens of completions that the loss mask counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowpeak.records import Record


@dataclass(frozen=True)
class LossTokens:
    """T loss tokens of B sequences, in the sequences' order and ascending within each.

    One tensor operation finds all of them: a rollout of short completions has hundreds of sequences.
    """

    sequences_T: Tensor  # index of the sequence
    flat_indices_T: Tensor  # index into all completions, concatenated
    offsets_T: Tensor  # index into the sequence's completion
    num_sequences: int

    @classmethod
    def of(cls, records: Sequence[Record]) -> LossTokens:
        """Return the loss tokens of these records."""
        lengths_B = torch.tensor([len(record.completion) for record in records], dtype=torch.int64)
        starts_B = lengths_B.cumsum(0) - lengths_B
        masks = [torch.zeros(0, dtype=torch.bool), *(record.completion.loss_mask for record in records)]
        flat_indices_T = torch.cat(masks).nonzero().flatten()
        sequences_T = torch.arange(len(records)).repeat_interleave(lengths_B)[flat_indices_T]
        return cls(sequences_T, flat_indices_T, flat_indices_T - starts_B[sequences_T], len(records))

    def counts(self) -> list[int]:
        """Return each sequence's number of loss tokens."""
        return torch.bincount(self.sequences_T, minlength=self.num_sequences).tolist()

    def context_lengths(self) -> list[int]:
        """Return how many tokens of each completion precede its last loss token; 0 without loss tokens.

        Only these are forwarded: later tokens predict nothing that the loss counts.
        """
        return (
            torch.zeros(self.num_sequences, dtype=torch.int64)
            .scatter_reduce(0, self.sequences_T, self.offsets_T, "amax")
            .tolist()
        )


def num_loss_tokens(record: Record) -> int:
    """Return the number of loss tokens of the completion."""
    return int(record.completion.loss_mask.count_nonzero())

"""Micro-batches: rows under a token budget, sorted by length, padded only inside the micro-batch.

Cutting never changes the result, because every unit of a loss carries its weight from the whole step's counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowpeak.records import MicroBatch, Record, TokenBatch


@dataclass(frozen=True)
class Budget:
    """How micro-batches are cut: rows times padded length at most `max_tokens`, lengths rounded up to `multiple`."""

    max_tokens: int
    multiple: int = 1
    pad_id: int = 0

    def padded(self, length: int) -> int:
        """`length` rounded up to the multiple."""
        return -(-length // self.multiple) * self.multiple


def cut(lengths: Sequence[int], budget: Budget) -> list[tuple[int, ...]]:
    """Row indices of each micro-batch: longest first, so that what does not fit fails at once and padding stays small.

    A row longer than the budget is a micro-batch of its own: units are never cut.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if room <= 0:
            width = budget.padded(lengths[index])
            batches.append([])
            room = max(1, budget.max_tokens // width)
        batches[-1].append(index)
        room -= 1
    return [tuple(batch) for batch in batches]


def counted_positions(record: Record) -> Tensor:
    """Indices into the completion of the tokens that the loss counts, int64."""
    return torch.nonzero(record.completion.loss_mask).flatten()


def num_counted(record: Record) -> int:
    """How many tokens of the completion the loss counts."""
    return int(record.completion.loss_mask.sum())


def pack(
    records: Sequence[Record],
    indices: Sequence[int],
    budget: Budget,
    unit_weight: Callable[[Record], float] | None = None,
    *,
    per_sequence: bool = False,
) -> list[MicroBatch]:
    """Micro-batches of `records[indices]`; `unit_weight` gives the weight of each of a row's units (None: all 0).

    Rows without a counted token are left out: nothing of them reaches a loss or a score.
    """
    kept = [i for i in indices if num_counted(records[i]) > 0]
    batches = cut([records[i].num_tokens for i in kept], budget)
    return [_build(records, [kept[j] for j in batch], budget, unit_weight, per_sequence) for batch in batches]


def masked(budget: Budget) -> MicroBatch:
    """A micro-batch for a rank with nothing left: one row of two tokens, one counted token, weight 0."""
    one = torch.zeros(1, dtype=torch.int64)
    tokens = TokenBatch(rows_T=one, num_rows=1, weights_U=torch.zeros(1), advantages_T=torch.zeros(1))
    ids = torch.full((1, 2), budget.pad_id, dtype=torch.int64)
    return MicroBatch(ids, one, one, tokens, (), 0)


def _build(
    records: Sequence[Record],
    indices: Sequence[int],
    budget: Budget,
    unit_weight: Callable[[Record], float] | None,
    per_sequence: bool,
) -> MicroBatch:
    rows = [records[i] for i in indices]
    counted = [counted_positions(row) for row in rows]
    ids, positions = _layout(rows, counted, budget)
    targets = torch.cat([row.completion.ids[where] for row, where in zip(rows, counted, strict=True)])
    tokens = _constants_of(rows, counted, unit_weight, per_sequence)
    useful = sum(row.num_tokens for row in rows)
    return MicroBatch(ids, positions, targets.to(torch.int64), tokens, tuple(indices), useful)


def _layout(rows: Sequence[Record], counted: Sequence[Tensor], budget: Budget) -> tuple[Tensor, Tensor]:
    """Padded ids [B, L], and the flat positions [T] whose hidden states predict the counted tokens."""
    width = budget.padded(max(row.num_tokens for row in rows))
    ids = torch.full((len(rows), width), budget.pad_id, dtype=torch.int64)
    positions = []
    for b, (row, where) in enumerate(zip(rows, counted, strict=True)):
        prompt_length = len(row.prompt_ids)
        ids[b, :prompt_length] = torch.tensor(row.prompt_ids, dtype=torch.int64)
        ids[b, prompt_length : row.num_tokens] = row.completion.ids
        positions.append(b * width + prompt_length - 1 + where)
    return ids, torch.cat(positions)


def _constants_of(
    rows: Sequence[Record],
    counted: Sequence[Tensor],
    unit_weight: Callable[[Record], float] | None,
    per_sequence: bool,
) -> TokenBatch:
    lengths = torch.tensor([len(where) for where in counted])
    weights = torch.tensor([unit_weight(row) if unit_weight else 0.0 for row in rows], dtype=torch.float32)
    advantages_T = _optional(rows, counted, [row.advantages for row in rows])
    return TokenBatch(
        rows_T=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        num_rows=len(rows),
        weights_U=weights if per_sequence else torch.repeat_interleave(weights, lengths),
        advantages_T=torch.zeros(int(lengths.sum())) if advantages_T is None else advantages_T,
        sampling_T=_optional(rows, counted, [row.completion.logprobs for row in rows]),
        old_T=_optional(rows, counted, [row.old for row in rows]),
        reference_T=_optional(rows, counted, [row.reference for row in rows]),
    )


def _optional(rows: Sequence[Record], counted: Sequence[Tensor], values: Sequence[Tensor | None]) -> Tensor | None:
    """The counted entries of per-completion values, one after another; None where the rollout has none."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    assert len(present) == len(rows), "a rollout is scored whole"
    return torch.cat([value[where].to(torch.float32) for value, where in zip(present, counted, strict=True)])


def scatter(record: Record, counted_values: Tensor) -> Tensor:
    """Values of a record's counted tokens back in their places of the completion, 0 elsewhere: float32 [C]."""
    full = torch.zeros(len(record.completion))
    full[record.completion.loss_mask] = counted_values.to(torch.float32)
    return full

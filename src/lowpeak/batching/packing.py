"""Micro-batches: rows under a token budget, as forests (no padding, prompts shared) or padded side by side.

Cutting never changes the result, because every unit of a loss carries its weight from the whole step's counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowpeak.batching.balance import assign
from lowpeak.batching.forest import Laid, plant
from lowpeak.batching.loss_tokens import CountedTokens
from lowpeak.batching.prefix import Costs, Layout, Part, assign_rows, fill, grouped, shared_parts
from lowpeak.records import Forest, MicroBatch, Record, TokenBatch, Tree, Unit

_FAR_BELOW = -1e3  # in nats


@dataclass(frozen=True)
class Budget:
    """How micro-batches are cut: at most `max_tokens` tokens, padding included, lengths rounded up to `multiple`.

    `layout` "shared" is forests with a prompt once for the rows that have it, where `costs` says that it pays (None:
    always); "rows" is forests of plain rows; "padded" is rows side by side, for models that take no forest.
    """

    max_tokens: int
    multiple: int = 1
    pad_id: int = 0
    layout: Layout = "padded"
    costs: Costs | None = None

    @property
    def capacity(self) -> int:
        """Tokens of a row that are still within `max_tokens` when rounded up."""
        return self.max_tokens // self.multiple * self.multiple

    def padded(self, length: int) -> int:
        """`length` rounded up to the multiple."""
        return -(-length // self.multiple) * self.multiple


def cut(lengths: Sequence[int], budget: Budget, bound: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Row indices of each micro-batch: longest first, so that what does not fit fails at once and padding stays small.

    A unit longer than the budget is a micro-batch of its own: units are never cut. Rows are units, or those of one number in
    `bound` together.
    """
    units = grouped(range(len(lengths)) if bound is None else bound)
    batches: list[list[int]] = []
    room = 0
    for unit in sorted(units, key=lambda rows: (-max(lengths[i] for i in rows), rows)):
        if room < len(unit):
            width = budget.padded(max(lengths[i] for i in unit))
            batches.append([])
            room = max(len(unit), budget.max_tokens // width)
        batches[-1] += unit
        room -= len(unit)
    return [tuple(batch) for batch in batches]


def pack(
    records: Sequence[Record],
    indices: Sequence[int],
    budget: Budget,
    unit_weight: Callable[[int], float] | None = None,
    *,
    unit: Unit = "token",
) -> list[MicroBatch]:
    """Micro-batches of `records[indices]`; each of a row's units weighs `unit_weight(its counted tokens)` (None: 0).

    Rows without a counted token are left out: nothing of them reaches a loss or a score. Where the unit is a pair, the rows of
    a group are one, which weighs `unit_weight(the counted tokens of both)`, and is left out when one of them is.
    """
    kept = _with_counted_tokens(records, indices, unit)
    batches = arrange(*_sizes(records, kept, budget), budget, _bound(records, kept, unit))
    seen: set[tuple[int, ...]] = set()
    return [
        _build(records, [[kept[j] for j in part] for part in parts], budget, seen, unit_weight, unit)
        for parts in batches
    ]


def arrange(
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[int],
    budget: Budget,
    bound: Sequence[int] | None = None,
) -> list[list[tuple[int, ...]]]:
    """The parts of each micro-batch, for rows of these prompts that need so many tokens after them.

    Rows of the same number in `bound` stay in one micro-batch, which is larger than the budget where they do not fit.
    """
    if budget.layout == "padded":
        lengths = [len(prompt) + length for prompt, length in zip(prompts, completions, strict=True)]
        return [[(row,) for row in batch] for batch in cut(lengths, budget, bound)]
    blocks = _blocks(prompts, completions, budget, bound)
    sizes = [sum(part.num_tokens for part in block) for block in blocks]
    return [[part.rows for b in batch for part in blocks[b]] for batch in fill(sizes, budget.capacity)]


def _blocks(
    prompts: Sequence[tuple[int, ...]], completions: Sequence[int], budget: Budget, bound: Sequence[int] | None
) -> list[list[Part]]:
    """Parts that stay together: each by itself, or those of the rows of one number in `bound`, whatever room they take."""
    if bound is None:
        return [[part] for part in _parts(prompts, completions, budget, budget.capacity)]
    blocks = []
    for rows in grouped(bound):
        own_prompts, lengths = [prompts[i] for i in rows], [completions[i] for i in rows]
        parts = _parts(own_prompts, lengths, budget, sum(map(len, own_prompts)) + sum(lengths))
        blocks.append([Part(tuple(rows[j] for j in part.rows), part.prompt, part.completions) for part in parts])
    return blocks


def _parts(prompts: Sequence[tuple[int, ...]], completions: Sequence[int], budget: Budget, capacity: int) -> list[Part]:
    if budget.layout == "shared":
        return shared_parts(prompts, completions, capacity, budget.costs)
    rows = enumerate(zip(prompts, completions, strict=True))
    return [Part((row,), len(prompt), (length,)) for row, (prompt, length) in rows]


def _bound(records: Sequence[Record], indices: Sequence[int], unit: Unit) -> list[int] | None:
    """What rows are bound by: the group of a pair's."""
    return [records[i].group for i in indices] if unit == "pair" else None


def _with_counted_tokens(records: Sequence[Record], indices: Sequence[int], unit: Unit) -> list[int]:
    counts = CountedTokens.of([records[i] for i in indices]).counts()
    without = {i for i, count in zip(indices, counts, strict=True) if not count}
    if unit != "pair":
        return [i for i in indices if i not in without]
    broken = {records[i].group for i in without}
    return [i for i in indices if records[i].group not in broken]


def share(
    records: Sequence[Record], indices: Sequence[int], budget: Budget, num_ranks: int, unit: Unit = "token"
) -> list[tuple[int, ...]]:
    """`indices` for each rank, balanced by the tokens that it forwards, the same answer on every rank."""
    if num_ranks == 1:
        return [tuple(indices)]
    prompts, completions = _sizes(records, indices, budget)
    bound = _bound(records, indices, unit)
    shares: Sequence[Sequence[int]]
    if bound is not None:
        loads = [sum(part.num_tokens for part in block) for block in _blocks(prompts, completions, budget, bound)]
        units = grouped(bound)
        shares = [[row for unit in mine for row in units[unit]] for mine in assign(loads, num_ranks)]
    elif budget.layout == "shared":
        shares = assign_rows(prompts, completions, num_ranks, budget.costs)
    else:
        shares = assign([len(p) + length for p, length in zip(prompts, completions, strict=True)], num_ranks)
    return [tuple(indices[j] for j in mine) for mine in shares]


def masked(budget: Budget) -> MicroBatch:
    """A micro-batch for a rank with nothing left: one row of two tokens, one counted token, weight 0.

    Its layout is that of the others, so that all ranks run the same kind of forward. Its loss may hold a KL, which is finite: the
    reference is far below any policy's log-prob, since exp(reference - policy) must not overflow before it is weighed.
    """
    one, zero = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    far = torch.full((1,), _FAR_BELOW)
    tokens = TokenBatch(one, 1, zero, zero, reference_T=far, values_T=zero, returns_T=zero, pairs_B=one)
    ids = torch.full((1, 2), budget.pad_id, dtype=torch.int64)
    forest = None if budget.layout == "padded" else Forest((Tree(0, 0, (2,)),), torch.arange(2)[None])
    return MicroBatch(ids, one, one, tokens, (), 0, forest)


def _sizes(
    records: Sequence[Record], indices: Sequence[int], budget: Budget
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Prompts, and how many tokens after them each row needs: all where it is padded, else those of a forest."""
    rows = [records[i] for i in indices]
    if budget.layout == "padded":
        return [row.prompt_ids for row in rows], [len(row.completion) for row in rows]
    return [row.prompt_ids for row in rows], CountedTokens.of(rows).needed()


def _build(
    records: Sequence[Record],
    parts: Sequence[Sequence[int]],
    budget: Budget,
    seen: set[tuple[int, ...]],
    unit_weight: Callable[[int], float] | None,
    unit: Unit,
) -> MicroBatch:
    """The micro-batch of these parts; `seen` are the prompts that the pass has had before, and grows by its own."""
    indices = [i for part in parts for i in part]
    rows = [records[i] for i in indices]
    counted = CountedTokens.of(rows)
    targets = torch.cat([row.completion.ids for row in rows])[counted.places_T]
    tokens = _constants_of(rows, counted, unit_weight, unit)
    if budget.layout == "padded":
        laid = _side_by_side(rows, counted, budget)
    else:
        laid = plant(rows, counted, [len(part) for part in parts], budget.padded, budget.pad_id)
    useful = laid.num_tokens
    for prompt in (records[part[0]].prompt_ids for part in parts):  # one that was forwarded before changes no result
        useful -= len(prompt) if prompt in seen else 0
        seen.add(prompt)
    return MicroBatch(
        laid.input_ids_BL, laid.positions_T, targets.to(torch.int64), tokens, tuple(indices), useful, laid.forest
    )


def _side_by_side(rows: Sequence[Record], counted: CountedTokens, budget: Budget) -> Laid:
    """Rows padded to one length."""
    width = budget.padded(max(row.num_tokens for row in rows))
    ids_BL = torch.full((len(rows), width), budget.pad_id, dtype=torch.int64)
    before = []  # of each row: the position before its completion
    for b, row in enumerate(rows):
        prompt_length = len(row.prompt_ids)
        ids_BL[b, :prompt_length] = torch.tensor(row.prompt_ids, dtype=torch.int64)
        ids_BL[b, prompt_length : row.num_tokens] = row.completion.ids
        before.append(b * width + prompt_length - 1)
    positions_T = torch.tensor(before)[counted.rows_T] + counted.columns_T
    return Laid(ids_BL, positions_T, None, sum(row.num_tokens for row in rows))


def _constants_of(
    rows: Sequence[Record], counted: CountedTokens, unit_weight: Callable[[int], float] | None, unit: Unit
) -> TokenBatch:
    pairs_B = None
    if unit == "pair":  # numbered in the order of their first row
        numbers: dict[int, int] = {}
        pairs_B = torch.tensor([numbers.setdefault(row.group, len(numbers)) for row in rows])
    advantages_T = _counted_values(counted, [row.advantages for row in rows])
    return TokenBatch(
        rows_T=counted.rows_T,
        num_rows=len(rows),
        weights_U=_weights(counted, unit_weight, unit, pairs_B),
        advantages_T=torch.zeros(len(counted.rows_T)) if advantages_T is None else advantages_T,
        sampling_T=_counted_values(counted, [row.completion.logprobs for row in rows]),
        old_T=_counted_values(counted, [row.old for row in rows]),
        reference_T=_counted_values(counted, [row.reference for row in rows]),
        values_T=_counted_values(counted, [row.values for row in rows]),
        returns_T=_counted_values(counted, [row.returns for row in rows]),
        pairs_B=pairs_B,
    )


def _weights(
    counted: CountedTokens, unit_weight: Callable[[int], float] | None, unit: Unit, pairs_B: Tensor | None
) -> Tensor:
    """What each unit weighs, by the counted tokens of its row, or of its pair; zeros where nothing says: float32 [U]."""
    unit_weight = unit_weight or (lambda count: 0.0)
    counts_B = torch.tensor(counted.counts())
    counts = counts_B if pairs_B is None else torch.bincount(pairs_B, weights=counts_B).long()
    weights = torch.tensor([unit_weight(count) for count in counts.tolist()], dtype=torch.float32)
    return weights[counted.rows_T] if unit == "token" else weights


def _counted_values(counted: CountedTokens, values: Sequence[Tensor | None]) -> Tensor | None:
    """The counted entries of per-completion values, one after another: float32 [T]; None where the rollout has none."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    assert len(present) == len(values), "a rollout is scored whole"
    return torch.cat(present)[counted.places_T].to(torch.float32)


def scatter(record: Record, counted_values: Tensor) -> Tensor:
    """Values of a record's counted tokens back in their places of the completion, 0 elsewhere: float32 [C]."""
    full = torch.zeros(len(record.completion))
    full[record.completion.loss_mask] = counted_values.to(torch.float32)
    return full

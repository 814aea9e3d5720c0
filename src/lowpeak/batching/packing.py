"""Micro-batches: sequences under a token budget, either padded to one length or packed into one row without padding.

The split into micro-batches never changes the result, because every unit of a loss carries its weight from the whole step's
counts, and no unit is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from lowpeak.batching.balance import balanced_partition, pack_bins
from lowpeak.batching.loss_tokens import LossTokens
from lowpeak.batching.packed_row import chains_of, pack_trees, path_lengths, unfold_paths
from lowpeak.batching.prefix_tree import LayerCosts, Layout, TreePlan, assign_trees, indices_by_key, plan_trees
from lowpeak.records import Forest, MicroBatch, Record, TokenBatch, Unit

_FAR_BELOW = -1e3  # in nats
Value = TypeVar("Value")


@dataclass(frozen=True)
class TokenBudget:
    """Size and layout of micro-batches: at most `max_tokens` with padding, lengths rounded up to `multiple`.

    Layout "shared" packs prefix trees, which forward a prompt once if `costs` says that it is cheaper (None: always);
    "rows" packs plain sequences; "padded" puts each sequence into a row of the batch, for models that take no packed rows.
    """

    max_tokens: int
    multiple: int = 1
    pad_id: int = 0
    layout: Layout = "padded"
    costs: LayerCosts | None = None

    @property
    def capacity(self) -> int:
        """The longest row that is within `max_tokens` when rounded up."""
        return self.max_tokens // self.multiple * self.multiple

    def round_up(self, length: int) -> int:
        """Return `length` rounded up to the multiple."""
        return -(-length // self.multiple) * self.multiple


def pack(
    records: Sequence[Record],
    indices: Sequence[int],
    budget: TokenBudget,
    unit_weight: Callable[[int], float] | None = None,
    *,
    unit: Unit = "token",
) -> list[MicroBatch]:
    """Pack `records[indices]` into micro-batches.

    `unit_weight` gives the weight of each unit from the number of loss tokens of its sequence, or of both sequences of a
    pair (None: 0). Sequences without a loss token are left out, since they reach neither a loss nor a score. If the unit is a
    pair, the two records of a group form it; a pair is left out if either sequence has no loss token.
    """
    kept = _with_loss_tokens(records, indices, unit)
    prompts, lengths, owners = _sequences(records, kept, budget)
    batches = plan_micro_batches(prompts, lengths, budget, _keys(records, owners, unit))
    seen_prompts: set[tuple[int, ...]] = set()
    return [
        _micro_batch(
            records, _unique(tuple(owners[j] for j in tree) for tree in trees), budget, seen_prompts, unit_weight, unit
        )
        for trees in batches
    ]


def assign_to_ranks(
    records: Sequence[Record], indices: Sequence[int], budget: TokenBudget, num_ranks: int, unit: Unit = "token"
) -> list[tuple[int, ...]]:
    """Assign `indices` to ranks, balanced by the tokens of their forwards; all ranks get the same result."""
    if num_ranks == 1:
        return [tuple(indices)]
    prompts, lengths, owners = _sequences(records, indices, budget)
    keys = _keys(records, owners, unit)
    per_rank: Sequence[Sequence[int]]
    if keys is not None:
        loads = list(map(_num_tokens, _blocks(prompts, lengths, budget, keys)))
        members = indices_by_key(keys)
        per_rank = [
            list(chain.from_iterable(members[i] for i in rank)) for rank in balanced_partition(loads, num_ranks)
        ]
    elif budget.layout == "shared":
        per_rank = assign_trees(prompts, lengths, num_ranks, budget.costs)
    else:
        per_rank = balanced_partition(
            [len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)], num_ranks
        )
    return [tuple(_unique(owners[j] for j in rank)) for rank in per_rank]


def masked_batch(budget: TokenBudget) -> MicroBatch:
    """Return a micro-batch of weight 0 for a rank with nothing left: two tokens, one of them a loss token.

    It has the layout of the others, so that all ranks run the same kind of forward.
    """
    zero, one = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    # Its loss may have a KL, which must be finite before it is multiplied by 0. The reference is far below any policy's
    # log-prob, so that exp(reference - policy) does not overflow.
    far = torch.full((1,), _FAR_BELOW)
    tokens = TokenBatch(one, 1, zero, zero, reference_T=far, values_T=zero, returns_T=zero, pairs_B=one)
    ids = torch.full((1, 2), budget.pad_id, dtype=torch.int64)
    forest = None if budget.layout == "padded" else Forest.of([(-1, 2)])
    return MicroBatch(ids, one, one, tokens, (), 0, forest)


def scatter(record: Record, loss_token_values: Tensor) -> Tensor:
    """Return values of a record's loss tokens at their positions in the completion, 0 elsewhere: float32 [C]."""
    full = torch.zeros(len(record.completion))
    full[record.completion.loss_mask] = loss_token_values.to(torch.float32)
    return full


# Which sequences form a micro-batch


def plan_micro_batches(
    prompts: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    budget: TokenBudget,
    keys: Sequence[int] | None = None,
) -> list[list[tuple[int, ...]]]:
    """Plan micro-batches of sequences with these prompts and `lengths` tokens after them: the trees of each.

    A tree is a tuple of indices. Sequences of the same key stay in one micro-batch, which may exceed the budget for it.
    """
    if budget.layout == "padded":
        total_lengths = [len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)]
        return [[(i,) for i in batch] for batch in split_padded(total_lengths, budget, keys)]
    blocks = _blocks(prompts, lengths, budget, keys)
    sizes = list(map(_num_tokens, blocks))
    return [[tree.sequences for b in batch for tree in blocks[b]] for batch in pack_bins(sizes, budget.capacity)]


def split_padded(
    lengths: Sequence[int], budget: TokenBudget, keys: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Split sequences into padded micro-batches, longest first: an out-of-memory error comes at once, padding is small.

    Sequences of the same key stay together. A sequence, or such a set, that exceeds the budget is a separate micro-batch.
    """
    blocks = indices_by_key(range(len(lengths)) if keys is None else keys)
    batches: list[list[int]] = []
    room = 0
    for block in sorted(blocks, key=lambda indices: (-max(lengths[i] for i in indices), indices)):
        if room < len(block):
            width = budget.round_up(max(lengths[i] for i in block))
            batches.append([])
            room = max(len(block), budget.max_tokens // width)
        batches[-1] += block
        room -= len(block)
    return [tuple(batch) for batch in batches]


def _num_tokens(block: Sequence[TreePlan]) -> int:
    return sum(tree.num_tokens for tree in block)


def _blocks(
    prompts: Sequence[tuple[int, ...]], lengths: Sequence[int], budget: TokenBudget, keys: Sequence[int] | None
) -> list[list[TreePlan]]:
    """Return trees that stay in one micro-batch: each by itself, or those of the sequences of one key."""
    if keys is None:
        return [[tree] for tree in _trees(prompts, lengths, budget, budget.capacity)]
    blocks = []
    for indices in indices_by_key(keys):
        block_prompts, block_lengths = [prompts[i] for i in indices], [lengths[i] for i in indices]
        # The block is never split, so its trees need no limit: all tokens fit.
        trees = _trees(block_prompts, block_lengths, budget, sum(map(len, block_prompts)) + sum(block_lengths))
        blocks.append(
            [TreePlan(tuple(indices[j] for j in tree.sequences), tree.prompt, tree.completions) for tree in trees]
        )
    return blocks


def _trees(
    prompts: Sequence[tuple[int, ...]], lengths: Sequence[int], budget: TokenBudget, capacity: int
) -> list[TreePlan]:
    if budget.layout == "shared":
        return plan_trees(prompts, lengths, capacity, budget.costs)
    sequences = enumerate(zip(prompts, lengths, strict=True))
    return [TreePlan((i,), len(prompt), (length,)) for i, (prompt, length) in sequences]


def _keys(records: Sequence[Record], owners: Sequence[int], unit: Unit) -> list[int] | None:
    """Return the key of the sequences that stay together: of a pair, or of one record; None if all may part."""
    if unit == "pair":
        return [records[i].group for i in owners]
    return list(owners) if len(set(owners)) < len(owners) else None


def _unique(values: Iterable[Value]) -> list[Value]:
    return list(dict.fromkeys(values))


def _with_loss_tokens(records: Sequence[Record], indices: Sequence[int], unit: Unit) -> list[int]:
    counts = LossTokens.of([records[i] for i in indices]).counts()
    empty = {i for i, count in zip(indices, counts, strict=True) if not count}
    if unit != "pair":
        return [i for i in indices if i not in empty]
    incomplete_pairs = {records[i].group for i in empty}
    return [i for i in indices if records[i].group not in incomplete_pairs]


def _sequences(
    records: Sequence[Record], indices: Sequence[int], budget: TokenBudget
) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Return the prompt of each sequence, how many more tokens the layout forwards, and the index of its record.

    In the padded layout a record has a sequence for each path, which includes its prompt; else one.
    """
    chosen = [records[i] for i in indices]
    rows: list[tuple[tuple[int, ...], int, int]] = []
    for index, record, chains in zip(indices, chosen, chains_of(chosen, LossTokens.of(chosen)), strict=True):
        if budget.layout == "padded":
            rows += [((), length, index) for length in path_lengths(record, chains)]
        else:
            rows.append((record.prompt_ids, sum(each.num_tokens for each in chains), index))
    return [prompt for prompt, _, _ in rows], [length for _, length, _ in rows], [index for _, _, index in rows]


# Tensors of a micro-batch


def _micro_batch(
    records: Sequence[Record],
    trees: Sequence[Sequence[int]],
    budget: TokenBudget,
    seen_prompts: set[tuple[int, ...]],
    unit_weight: Callable[[int], float] | None,
    unit: Unit,
) -> MicroBatch:
    """Build the micro-batch of these trees and add their prompts to `seen_prompts`, those of earlier micro-batches."""
    indices = [i for tree in trees for i in tree]
    chosen = [records[i] for i in indices]
    loss_tokens = LossTokens.of(chosen)
    targets = torch.cat([record.completion.ids for record in chosen])[loss_tokens.flat_indices_T]
    tokens = _token_batch(chosen, loss_tokens, unit_weight, unit)
    inputs = pack_trees(chosen, loss_tokens, [len(tree) for tree in trees], budget.round_up, budget.pad_id)
    if budget.layout == "padded":
        inputs = unfold_paths(inputs, budget.round_up, budget.pad_id)
    num_useful = inputs.num_tokens
    for prompt in (records[tree[0]].prompt_ids for tree in trees):
        # A prompt that the pass forwarded before changes no result.
        num_useful -= len(prompt) if prompt in seen_prompts else 0
        seen_prompts.add(prompt)
    return MicroBatch(
        inputs.input_ids_BL,
        inputs.positions_T,
        targets.to(torch.int64),
        tokens,
        tuple(indices),
        num_useful,
        inputs.forest,
        inputs.repeated,
    )


def _token_batch(
    records: Sequence[Record], loss_tokens: LossTokens, unit_weight: Callable[[int], float] | None, unit: Unit
) -> TokenBatch:
    pairs_B = None
    if unit == "pair":  # numbered in the order of their first sequence
        numbers: dict[int, int] = {}
        pairs_B = torch.tensor([numbers.setdefault(record.group, len(numbers)) for record in records])
    advantages_T = _loss_token_values(loss_tokens, [record.advantages for record in records])
    return TokenBatch(
        sequences_T=loss_tokens.sequences_T,
        num_sequences=len(records),
        weights_U=_unit_weights(loss_tokens, unit_weight, unit, pairs_B),
        advantages_T=torch.zeros(len(loss_tokens.sequences_T)) if advantages_T is None else advantages_T,
        sampling_T=_loss_token_values(loss_tokens, [record.completion.logprobs for record in records]),
        old_T=_loss_token_values(loss_tokens, [record.old for record in records]),
        reference_T=_loss_token_values(loss_tokens, [record.reference for record in records]),
        values_T=_loss_token_values(loss_tokens, [record.values for record in records]),
        returns_T=_loss_token_values(loss_tokens, [record.returns for record in records]),
        pairs_B=pairs_B,
    )


def _unit_weights(
    loss_tokens: LossTokens, unit_weight: Callable[[int], float] | None, unit: Unit, pairs_B: Tensor | None
) -> Tensor:
    """Return each unit's weight by the loss tokens of its sequence or pair; zeros without `unit_weight`: float32 [U]."""
    unit_weight = unit_weight or (lambda count: 0.0)
    counts_B = torch.tensor(loss_tokens.counts())
    counts = counts_B if pairs_B is None else torch.bincount(pairs_B, weights=counts_B).long()
    weights = torch.tensor([unit_weight(count) for count in counts.tolist()], dtype=torch.float32)
    return weights[loss_tokens.sequences_T] if unit == "token" else weights


def _loss_token_values(loss_tokens: LossTokens, values: Sequence[Tensor | None]) -> Tensor | None:
    """Return the loss tokens' entries of per-completion values: float32 [T]; None if the rollout has no such values."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    assert len(present) == len(values), "either all records of a rollout are scored or none"
    return torch.cat(present)[loss_tokens.flat_indices_T].to(torch.float32)

"""A row of ids without padding between its trees: a prompt and its completions each, with their branches, depth first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lowpeak.batching.forests import paths
from lowpeak.batching.loss_tokens import LossTokens
from lowpeak.records import Forest, Record

# Tokens that two sequences without a common prompt (a subagent's) must begin with to forward them once.
_LEAST_SHARED = 16


@dataclass(frozen=True)
class Chain:
    """Tokens [start, stop) of a record, by index in prompt + completion; the first follows token `after`, -1: none."""

    start: int
    stop: int
    after: int
    owner: int = -1  # index of the chain that has token `after`; -1: the prompt or none

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def chains_of(records: Sequence[Record], loss_tokens: LossTokens) -> list[list[Chain]]:
    """Return the chains of each completion, the first and its branches, with the tokens that a pass forwards.

    Each forwarded token precedes a loss token in a sequence, since others predict nothing that the loss counts.
    """
    found = []
    for record, length in zip(records, loss_tokens.context_lengths(), strict=True):
        first = len(record.prompt_ids)
        found.append(_forwarded(record) if record.completion.branches else [Chain(first, first + length, first - 1)])
    return found


def _forwarded(record: Record) -> list[Chain]:
    """Return the chains of a completion with branches; one that no loss token follows is empty and follows none."""
    first, completion = len(record.prompt_ids), record.completion
    starts = [first, *(first + branch.start for branch in completion.branches)]
    afters = [first - 1, *(branch.after for branch in completion.branches)]
    counts = [stop - start for start, stop in pairwise([*starts, record.num_tokens])]
    owners = [bisect_right(starts, after) - 1 for after in afters]
    stops = _forwarded_stops(starts, afters, owners, completion.loss_mask.split(counts))
    columns = zip(starts, stops, afters, owners, strict=True)
    return [Chain(*each) if each[1] >= 0 else Chain(each[0], each[0], -1) for each in columns]


def _forwarded_stops(
    starts: Sequence[int], afters: Sequence[int], owners: Sequence[int], losses: Sequence[Tensor]
) -> list[int]:
    """Return the end of each chain's forwarded tokens: its last loss token, or the first after one that a chain follows.

    -1 for a chain that no loss token follows.
    """
    stops = [start + int(mask.nonzero()[-1]) if mask.any() else -1 for start, mask in zip(starts, losses, strict=True)]
    for index in reversed(range(len(starts))):
        assert afters[index] >= 0 or not losses[index][:1].any(), "nothing predicts the first token of a sequence"
        if owners[index] >= 0 and stops[index] >= 0:
            stops[owners[index]] = max(stops[owners[index]], afters[index] + 1)
    return stops


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of a forward: ids, the positions that predict the loss tokens, and the forest if the layout is packed."""

    input_ids_BL: Tensor
    positions_T: Tensor
    forest: Forest | None
    num_tokens: int  # without padding and tokens that an earlier row of the sequence has
    repeated: tuple[int, ...] = ()  # of each padded row


def pack_trees(
    records: Sequence[Record],
    loss_tokens: LossTokens,
    tree_sizes: Sequence[int],
    round_up: Callable[[int], int],
    pad_id: int,
) -> ModelInputs:
    """Concatenate trees into one row of ids, padded at its end to `round_up` of its length.

    The first `tree_sizes[0]` records form the first tree, and so on. A tree takes its first record's prompt. A token that several
    tokens follow predicts each of them, so `positions_T` repeats it.
    """
    row = PackedRow()
    remaining = iter(zip(records, chains_of(records, loss_tokens), strict=True))
    for size in tree_sizes:
        row.add_tree([next(remaining) for _ in range(size)])
    num_tokens = row.length
    padding = round_up(num_tokens) - num_tokens
    ids = [*row.ids, torch.full((padding,), pad_id, dtype=torch.int64)]
    forest = Forest.of(row.shape(), padding)
    return ModelInputs(torch.cat(ids)[None], row.positions(loss_tokens), forest, num_tokens)


@dataclass
class _Part:
    """Consecutive tokens of a tree; the first follows token `offset` of the part `owner`, -1: none."""

    ids: Tensor
    owner: int = -1
    offset: int = -1
    start: int = -1  # in the row


class _Range(NamedTuple):
    """Consecutive tokens of all completions in a part; before the first is token `offset` of the part `owner`, -1: none."""

    first: int
    owner: int
    offset: int
    part: int


class _Added(NamedTuple):
    """A chain's own part, and how many of its tokens are in an earlier one, `source`, that begins alike (-1: none)."""

    part: int
    num_shared: int
    source: int


class PackedRow:
    """The parts of a row's trees, one after another, depth first."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []
        self.length = 0
        self._heads: dict[int, int] = {}  # the token before each part by the part's first, -1: none
        # Of ranges of all completions' tokens: the first, the token of the row before it, and the first's in the row.
        self._places: list[tuple[int, int, int]] = []
        self._num_completion_tokens = 0

    def add_tree(self, members: Sequence[tuple[Record, list[Chain]]]) -> None:
        """Add records with one prompt: its tokens and those of their completions, what begins alike once."""
        prompt_ids = members[0][0].prompt_ids
        assert prompt_ids, "a prompt has at least one token: it predicts the completion's first"
        parts, ranges = [_Part(torch.tensor(prompt_ids))], list[_Range]()
        for record, chains in members:
            ranges += self._add_chains(record, chains, parts)
            self._num_completion_tokens += len(record.completion)
        followers: dict[int, list[int]] = {}
        for index, part in enumerate(parts):
            followers.setdefault(part.owner, []).append(index)
        parts[0].ids = parts[0].ids[: 1 + max((parts[i].offset for i in followers.get(0, [])), default=-1)]
        waiting = followers[-1][::-1]
        while waiting:
            index = waiting.pop()
            self._place(parts, parts[index])
            waiting += sorted(followers.get(index, []), key=lambda i: (parts[i].offset, -i))
        for first, owner, offset, index in ranges:
            self._places.append((first, parts[owner].start + offset if owner >= 0 else -1, parts[index].start))

    def _add_chains(self, record: Record, chains: Sequence[Chain], parts: list[_Part]) -> list[_Range]:
        """Add a record's chains to `parts`, and return where their tokens are."""
        ranges: list[_Range] = []
        added: list[_Added] = []
        first = len(record.prompt_ids)
        for chain in chains:
            ids = record.completion.ids[chain.start - first : chain.stop - first]
            owner, offset = 0 if chain.after >= 0 else -1, chain.after  # part 0 is the prompt
            if chain.owner >= 0:
                part, shared, source = added[chain.owner]
                offset -= chains[chain.owner].start
                owner, offset = (part, offset - shared) if offset >= shared else (source, offset)
            start, source, shared = self._num_completion_tokens + chain.start - first, -1, 0
            if owner < 0:
                source, shared = _longest_match(parts, ids)
            if shared:
                ranges.append(_Range(start, -1, -1, source))
                owner, offset = source, shared - 1
            added.append(_Added(len(parts), shared, source))
            ranges.append(_Range(start + shared, owner, offset, len(parts)))
            parts.append(_Part(ids[shared:], owner, offset))
        return ranges

    def _place(self, parts: Sequence[_Part], part: _Part) -> None:
        part.start = self.length
        if len(part.ids):
            self._heads[self.length] = parts[part.owner].start + part.offset if part.owner >= 0 else -1
            self.ids.append(part.ids)
            self.length += len(part.ids)

    def shape(self) -> list[tuple[int, int]]:
        """Return the nodes' parents and lengths: parts split where several tokens follow one."""
        followers: dict[int, list[int]] = {}
        for start, after in self._heads.items():
            followers.setdefault(after, []).append(start)
        starts = {start: -1 for start in followers.pop(-1, [])}
        for after, mine in followers.items():
            if after + 1 not in self._heads:
                mine.append(after + 1)
            if len(mine) > 1:
                starts |= dict.fromkeys(mine, after)
        bounds = sorted(starts)
        ends = {stop: index for index, stop in enumerate([*bounds[1:], self.length])}
        parents = [ends[starts[start] + 1] if starts[start] >= 0 else -1 for start in bounds]
        return [
            (parent, stop - start)
            for parent, (start, stop) in zip(parents, pairwise([*bounds, self.length]), strict=True)
        ]

    def positions(self, loss_tokens: LossTokens) -> Tensor:
        """Return the token of the row that predicts each loss token: int64 [T]."""
        starts_C, afters_C, places_C = torch.tensor(self._places).T.contiguous()
        chains_T = torch.searchsorted(starts_C, loss_tokens.flat_indices_T, right=True) - 1
        offsets_T = loss_tokens.flat_indices_T - starts_C[chains_T]
        return torch.where(offsets_T > 0, places_C[chains_T] + offsets_T - 1, afters_C[chains_T])


def _longest_match(parts: Sequence[_Part], ids: Tensor) -> tuple[int, int]:
    """Return the part without an owner that begins most like `ids`, and how many tokens; (-1, 0) below `_LEAST_SHARED`."""
    best = (-1, 0)
    for index, part in enumerate(parts):
        length = min(len(part.ids), len(ids))
        if part.owner < 0 and length >= _LEAST_SHARED:
            differs = (part.ids[:length] != ids[:length]).nonzero()
            shared = int(differs[0]) if len(differs) else length
            best = (index, shared) if shared >= max(_LEAST_SHARED, best[1] + 1) else best
    return best


def path_lengths(record: Record, chains: list[Chain]) -> list[int]:
    """Return the length of each sequence of a record."""
    if len(chains) == 1:
        return [chains[0].stop]
    row = PackedRow()
    row.add_tree([(record, chains)])
    return [len(path) for path in paths(Forest.of(row.shape()).nodes)]


def unfold_paths(packed: ModelInputs, round_up: Callable[[int], int], pad_id: int) -> ModelInputs:
    """Return the sequences of a packed row as rows, padded on the right; a token is predicted in the first that has it."""
    assert packed.forest is not None
    rows = paths(packed.forest.nodes)
    width = round_up(max(map(len, rows)))
    ids_BL = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    rows_L = torch.zeros(packed.num_tokens, dtype=torch.int64)
    for b, path in reversed(list(enumerate(rows))):
        ids_BL[b, : len(path)] = packed.input_ids_BL[0, path]
        rows_L[path] = b
    repeated = tuple(int((rows_L[path] < b).count_nonzero()) for b, path in enumerate(rows))
    columns_T = packed.forest.position_ids_1L[0, packed.positions_T]
    return ModelInputs(ids_BL, rows_L[packed.positions_T] * width + columns_T, None, packed.num_tokens, repeated)

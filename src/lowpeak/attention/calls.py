"""The kernel calls that attention over a forest takes on a CPU: one for each long block of its mask, one for many short.

A call costs about 0.08 ms, forward and backward, whatever it computes: more than all of a short block's arithmetic. So
short blocks of similar size are copied side by side, padded on the right, and run as one call. In a causal block no
real query sees what is padded behind it. Towards prompts, blocks of one number of keys come together and only queries
are padded. Padding repeats its block's last token, so that all numbers stay finite; its results go to a row behind the
forest's that nobody reads, and its gradient is 0, so that it adds nothing to another's.

Shapes: L rows, H query heads on K key heads, R = H / K; X is a head's width, or 1 for a log-sum-exp. Query head
k * R + r reads key head k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowpeak.records import Tree

# Numbers in the queries of the largest block that is copied: copies cost as much as the call they save at 64 tokens of
# width 128 (heads times their width), at 16 of 512 and at 8 of 896 (one core, fp32; a key head for each or for seven).
_LARGEST = 8192
# Fewer blocks than this are not worth the work of gathering them.
_FEWEST = 4
# The share of a call's queries that may be padding, and their number: together they bound the memory of the copies.
_WASTE = 0.25
_MOST = 4096


@dataclass(frozen=True)
class Direct:
    """One block of the mask, read and written where it is, heads folded into the batch: [R, K, rows, X].

    Its queries are `rows`, its keys `columns`. `own` is a token's own, causal block; the others are of all completions
    of a tree and their prompt.
    """

    rows: slice
    columns: slice
    own: bool

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of keys and of queries."""
        return self.columns.stop - self.columns.start, self.rows.stop - self.rows.start

    def queries(self, x_LHX: Tensor, num_kv: int) -> Tensor:
        """[R, K, rows, X], a view."""
        return x_LHX[self.rows].unflatten(1, (num_kv, -1)).permute(2, 1, 0, 3)

    gradients = queries

    def keys(self, x_LKX: Tensor, repeats: int) -> Tensor:
        """[R, K, columns, X], each R the same memory."""
        return x_LKX[self.columns].transpose(0, 1).expand(repeats, -1, -1, -1)

    def put_queries(self, target_LHX: Tensor, part: Tensor, num_kv: int) -> None:
        """Write what is of own blocks, which every token has one of; add the others, which come after."""
        _put(self.queries(target_LHX, num_kv), part, self.own)

    def put_keys(self, target_LKX: Tensor, part: Tensor) -> None:
        """As `put_queries`, summed over R."""
        shared = part if part.shape[0] == 1 else part.sum(0, keepdim=True)
        _put(self.keys(target_LKX, 1), shared, self.own)

    def merge(self, out_LHE: Tensor, lse_LH1: Tensor, part: Tensor, part_lse: Tensor, num_kv: int) -> None:
        """Add a block's keys to what its queries have seen before."""
        _merge(self.queries(out_LHE, num_kv), self.queries(lse_LH1, num_kv), part, part_lse.unsqueeze(-1))


@dataclass(frozen=True)
class Together:
    """N short blocks as one call on copies of them, each as long as the longest: [N, H, rows, X].

    Indices are int64 [N * longest]: where a query or key is read, and where its result goes.
    """

    num_blocks: int
    rows: Tensor
    columns: Tensor
    rows_into: Tensor
    columns_into: Tensor
    padding: Tensor | None  # bool, which of `rows` are; None where none is
    own: bool

    def queries(self, x_LHX: Tensor, num_kv: int) -> Tensor:
        """[N, H, rows, X], a copy."""
        return self._apart(_rows_of(x_LHX, self.rows))

    def gradients(self, x_LHX: Tensor, num_kv: int) -> Tensor:
        """As `queries`, 0 in padding."""
        taken = _rows_of(x_LHX, self.rows)
        return self._apart(taken if self.padding is None else taken.masked_fill_(self.padding[:, None, None], 0))

    def keys(self, x_LKX: Tensor, repeats: int) -> Tensor:
        """[N, H, columns, X], a copy with each key head R times."""
        taken = self._apart(_rows_of(x_LKX, self.columns))
        return taken if repeats == 1 else taken.repeat_interleave(repeats, 1)

    def put_queries(self, target_LHX: Tensor, part: Tensor, num_kv: int) -> None:
        """Write what is of own blocks, which every token has one of; add the others, which come after."""
        self._put(target_LHX, self.rows_into, part.transpose(1, 2).flatten(0, 1))

    def put_keys(self, target_LKX: Tensor, part: Tensor) -> None:
        """As `put_queries`, summed over R."""
        part_LHX = part.transpose(1, 2).flatten(0, 1)
        if part.shape[1] != target_LKX.shape[1]:
            part_LHX = part_LHX.unflatten(1, (target_LKX.shape[1], -1)).sum(2)
        self._put(target_LKX, self.columns_into, part_LHX)

    def merge(self, out_LHE: Tensor, lse_LH1: Tensor, part: Tensor, part_lse: Tensor, num_kv: int) -> None:
        """Add the blocks' keys to what their queries have seen before."""
        out, lse = self.queries(out_LHE, num_kv), self.queries(lse_LH1, num_kv)
        _merge(out, lse, part, part_lse.unsqueeze(-1))
        for target, merged in ((out_LHE, out), (lse_LH1, lse)):
            target.index_copy_(0, self.rows_into, merged.transpose(1, 2).flatten(0, 1))

    def _apart(self, taken: Tensor) -> Tensor:
        return taken.unflatten(0, (self.num_blocks, -1)).transpose(1, 2)

    def _put(self, target: Tensor, into: Tensor, part: Tensor) -> None:
        if self.own:
            target.index_copy_(0, into, part)
        else:
            target.index_add_(0, into, part)


Calls = Sequence[Direct | Together]


def calls_of(trees: Sequence[Tree], length: int, width: int, device: torch.device) -> Calls:
    """The calls for a forest in a row of `length`, own blocks first; built of numbers alone, once for all layers.

    `width` is that of all query heads. A block is short if its tokens times `width` are at most 8192. Results go to
    `length + 1` rows, the last of which is padding's.
    """
    blocks = list(_blocks(trees))
    calls: list[Direct | Together] = []
    for own in (True, False):
        kind = [block for block in blocks if block.own is own]
        short = [block for block in kind if max(block.size) * width <= _LARGEST]
        calls += [block for block in kind if max(block.size) * width > _LARGEST]
        # Causal blocks have keys for each query; towards prompts those of one number of keys come one after another.
        short.sort(key=lambda block: block.size, reverse=True)
        for bucket in _buckets(short):
            calls += bucket if len(bucket) < _FEWEST else [_together(bucket, length, device)]
    return calls


def _blocks(trees: Sequence[Tree]) -> Iterator[Direct]:
    """The mask's blocks that are not empty."""
    for tree in trees:
        start = tree.start
        for tokens in (tree.prompt, *tree.completions):
            if tokens:
                own = slice(start, start + tokens)
                yield Direct(own, own, True)
            start += tokens
        if 0 < tree.prompt < tree.num_tokens:
            answers = tree.start + tree.prompt
            yield Direct(slice(answers, tree.start + tree.num_tokens), slice(tree.start, answers), False)


def _buckets(blocks: Sequence[Direct]) -> list[list[Direct]]:
    """Blocks of falling size that come together, each bucket as large as `_WASTE` and `_MOST` let it be."""
    buckets: list[list[Direct]] = []
    real = 0
    for block in blocks:
        keys, rows = block.size
        first = buckets[-1][0] if buckets else block
        padded = (len(buckets[-1]) + 1) * first.size[1] if buckets else 0
        fits = buckets and (block.own or keys == first.size[0]) and padded <= _MOST
        if fits and real + rows >= (1 - _WASTE) * padded:
            buckets[-1].append(block)
            real += rows
        else:
            buckets.append([block])
            real = rows
    return buckets


def _together(blocks: Sequence[Direct], length: int, device: torch.device) -> Together:
    """The longest block comes first."""
    num_columns, longest = blocks[0].size
    shortest = blocks[-1].size[1]
    starts_N1 = torch.tensor([[block.rows.start] for block in blocks], device=device)
    tokens_N1 = torch.tensor([[block.size[1]] for block in blocks], device=device)
    place_S = torch.arange(longest, device=device)
    rows = (starts_N1 + torch.minimum(place_S, tokens_N1 - 1)).flatten()
    padding = (place_S >= tokens_N1).flatten() if shortest < longest else None
    into = rows if padding is None else rows.masked_fill(padding, length)
    if blocks[0].own:
        return Together(len(blocks), rows, rows, into, into, padding, True)
    begins_N1 = torch.tensor([[block.columns.start] for block in blocks], device=device)
    columns = (begins_N1 + torch.arange(num_columns, device=device)).flatten()
    return Together(len(blocks), rows, columns, into, columns, padding, False)


def _rows_of(x_LHX: Tensor, index: Tensor) -> Tensor:
    """`x_LHX[index]`; rows of one dimension are copied faster."""
    return x_LHX.flatten(1).index_select(0, index).unflatten(1, x_LHX.shape[1:])


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add another part of the keys to `out` [..., E] and `lse` [..., 1], in place, in at least fp32."""
    total = torch.logaddexp(lse, other_lse)
    share = (other_lse - total).exp_()
    if out.dtype == share.dtype:
        out.lerp_(other, share)
    else:
        out.copy_(torch.lerp(out.to(share.dtype), other.to(share.dtype), share))
    lse.copy_(total)


def _put(target: Tensor, part: Tensor, own: bool) -> None:
    """Every token has one own block, which comes before what is added to it."""
    if own:
        target.copy_(part)
    else:
        target.add_(part)

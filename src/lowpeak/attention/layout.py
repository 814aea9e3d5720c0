"""What a forward pass carries to its attention layers: a forest's trees, and what is built of them once for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowpeak.attention.flex import block_mask
from lowpeak.records import Forest, Tree

# The share of a call's scores that may be padding, and its keys: together they bound the memory of the copies.
_WASTE = 0.25
_MOST = 4096


class ForestLayout:
    """The keyword argument `forest` of a model's forward.

    Neither a tuple nor a dataclass, because wrappers (DDP, FSDP) take those apart to move and cast tensors.
    """

    __slots__ = ("_calls", "block_mask", "trees")

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self.trees: tuple[Tree, ...] = forest.trees
        length = forest.position_ids_1L.shape[1]
        self.block_mask = block_mask(forest.trees, length, device) if device.type == "cuda" else None
        self._calls: Calls | None = None

    def calls(self, query_1HLE: Tensor) -> Calls:
        """The kernel calls of the way off CUDA, built by the first layer that goes it."""
        if self._calls is None:
            self._calls = Calls(self.trees, query_1HLE)
        return self._calls


@dataclass(frozen=True)
class Segment:
    """A prompt, or a completion with the prompt that it sees: ranges of places in the row."""

    prompt: range
    own: range

    @property
    def is_causal(self) -> bool:
        """Whether scoring the prompt's queries again is cheaper than a mask: (P + C)^2 / 2 scores beside C (P + C)."""
        return len(self.prompt) <= len(self.own)

    @property
    def rows(self) -> list[int]:
        """Places of the queries."""
        return self.columns if self.is_causal else [*self.own]

    @property
    def columns(self) -> list[int]:
        """Places of the keys."""
        return [*self.prompt, *self.own]


@dataclass(frozen=True)
class Call:
    """N segments as one call of the kernel: places of the queries [N * rows] and of the keys [N * columns] in the row.

    Padding repeats a segment's last token, so that all numbers stay finite; nothing reads its results. `mask`, added to
    the scores, is [N, 1, rows, columns] or [1, ...]; without one the segments are causal.
    """

    num_segments: int
    rows: Tensor
    columns: Tensor
    mask: Tensor | None


class Calls:
    """Attention over a forest by torch's own kernel: the calls, and where each token of the row finds its result.

    A call costs more than all arithmetic of a short segment, so segments of similar size are one.
    """

    def __init__(self, trees: Sequence[Tree], query_1HLE: Tensor) -> None:
        device, length = query_1HLE.device, query_1HLE.shape[2]
        self.calls: list[Call] = []
        places, stop = [-1] * length, 0
        for segments in _buckets(trees):
            num_rows = len(segments[0].rows)
            for segment in segments:
                first = stop + (len(segment.prompt) if segment.is_causal else 0)
                places[segment.own.start : segment.own.stop] = range(first, first + len(segment.own))
                stop += num_rows
            self.calls.append(_call(segments, num_rows, query_1HLE))
        # The last row of the results is padding's.
        self._places_L = torch.tensor([place if place >= 0 else stop for place in places], device=device)

    def attend(self, query_1HLE: Tensor, key_1KLE: Tensor, value_1KLE: Tensor, scale: float) -> Tensor:
        """[1, L, H, E]: softmax(scale * query key^T + log(forest_mask)) value; zeros where a token sees nothing."""
        query_LHE, key_LKE, value_LKE = (x[0].transpose(0, 1) for x in (query_1HLE, key_1KLE, value_1KLE))
        parts = []
        for call in self.calls:
            inputs = ((query_LHE, call.rows), (key_LKE, call.columns), (value_LKE, call.columns))
            query, key, value = (
                _rows_of(x, index).unflatten(0, (call.num_segments, -1)).transpose(1, 2) for x, index in inputs
            )
            out_NHRE = F.scaled_dot_product_attention(
                query, key, value, attn_mask=call.mask, is_causal=call.mask is None, scale=scale, enable_gqa=True
            )
            parts.append(out_NHRE.transpose(1, 2).flatten(0, 1))
        parts.append(query_LHE.new_zeros(1, *query_LHE.shape[1:]))
        return _rows_of(torch.cat(parts), self._places_L)[None]


def _segments(trees: Sequence[Tree]) -> Iterator[Segment]:
    """Those that are not empty."""
    for tree in trees:
        start = tree.start + tree.prompt
        prompt = range(tree.start, start)
        if prompt:
            yield Segment(range(0), prompt)
        for tokens in tree.completions:
            if tokens:
                yield Segment(prompt, range(start, start + tokens))
            start += tokens


def _buckets(trees: Sequence[Tree]) -> list[list[Segment]]:
    """Segments that are one call, the one with the most queries and keys first."""
    buckets: list[list[Segment]] = []
    scores = 0  # of the last bucket without its padding
    for segment in sorted(_segments(trees), key=lambda s: (s.is_causal, len(s.rows), len(s.columns)), reverse=True):
        own = len(segment.rows) * len(segment.columns)
        first = buckets[-1][0] if buckets else segment
        num_columns = max(len(first.columns), len(segment.columns))
        padded = (len(buckets[-1]) + 1) * num_columns if buckets else 0
        fits = buckets and segment.is_causal == first.is_causal and padded <= _MOST
        if fits and scores + own >= (1 - _WASTE) * padded * len(first.rows):
            buckets[-1].append(segment)
            scores += own
        else:
            buckets.append([segment])
            scores = own
    return buckets


def _call(segments: Sequence[Segment], num_rows: int, query: Tensor) -> Call:
    num_columns, device = max(len(segment.columns) for segment in segments), query.device
    rows = [place for segment in segments for place in _padded(segment.rows, num_rows)]
    columns = [place for segment in segments for place in _padded(segment.columns, num_columns)]
    mask = None
    if not segments[0].is_causal:
        prompts = [len(segment.prompt) for segment in segments]
        prompts_N11 = torch.tensor(prompts if len(set(prompts)) > 1 else prompts[:1], device=device)[:, None, None]
        last_NR1 = prompts_N11 + torch.arange(num_rows, device=device)[:, None]
        hidden = torch.arange(num_columns, device=device) > last_NR1
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None]
    return Call(len(segments), torch.tensor(rows, device=device), torch.tensor(columns, device=device), mask)


def _padded(places: list[int], length: int) -> list[int]:
    return places + places[-1:] * (length - len(places))


def _rows_of(x_LHX: Tensor, index: Tensor) -> Tensor:
    """`x_LHX[index]`; rows of one dimension are copied faster."""
    return x_LHX.flatten(1).index_select(0, index).unflatten(1, x_LHX.shape[1:])

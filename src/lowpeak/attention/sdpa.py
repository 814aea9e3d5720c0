"""Attention over a forest off CUDA, by a few batched calls of torch's scaled_dot_product_attention.

Shapes: L packed tokens, H query heads, K key heads, E head width, N segments of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowpeak.attention.scores import PLAIN, ScoreModifiers
from lowpeak.attention.spans import FULL, Span
from lowpeak.batching import prefixes
from lowpeak.records import Node

# The largest fraction of a call's scores that may be padding, and its most keys; together they bound the copies' memory.
_MAX_PADDING = 0.25
_MAX_KEYS = 4096
_LEAST_TOKENS = 64  # of a segment that a window splits


@dataclass(frozen=True)
class Segment:
    """Some tokens of a node, and the earlier tokens that these attend to: indices of packed tokens.

    `start` is the first key's position. The keys of a sequence are split, so that those of a window are few.
    """

    prefix: list[int]
    tokens: list[int]
    start: int
    span: Span

    @property
    def is_causal(self) -> bool:
        """Whether to recompute the prefix's queries too, so that no mask is needed.

        For a prefix of P tokens and C more this costs (P + C)^2 / 2 scores, and a mask C (P + C).
        """
        is_seen = self.span.size is None or len(self.keys) <= self.span.size
        return len(self.prefix) <= len(self.tokens) and is_seen

    @property
    def queries(self) -> list[int]:
        """Indices of the queries among the packed tokens."""
        return self.keys if self.is_causal else self.tokens

    @property
    def keys(self) -> list[int]:
        """Indices of the keys among the packed tokens."""
        return [*self.prefix, *self.tokens]


@dataclass(frozen=True)
class SdpaCall:
    """N segments of one call: indices of queries [N * num_queries] and keys [N * num_keys] among the packed tokens.

    Padding repeats a segment's last token, so that all numbers stay finite; its results are unused. `mask`, added to the
    scores, is [N, 1, num_queries, num_keys] or [1, ...]; without one the segments are causal.
    """

    num_segments: int
    queries: Tensor
    keys: Tensor
    mask: Tensor | None


class SdpaCalls:
    """The calls for a forest, and the index of each packed token among their results.

    A call's overhead exceeds the arithmetic of a short segment, so segments of similar size share a call.
    """

    def __init__(self, nodes: Sequence[Node], query_1HLE: Tensor, span: Span = FULL) -> None:
        device, length = query_1HLE.device, query_1HLE.shape[2]
        self.calls: list[SdpaCall] = []
        sources, num_results = [-1] * length, 0
        for segments in _buckets(nodes, span):
            num_queries = len(segments[0].queries)
            for segment in segments:
                first = num_results + (len(segment.prefix) if segment.is_causal else 0)
                for i, token in enumerate(segment.tokens, first):
                    sources[token] = i
                num_results += num_queries
            self.calls.append(_call(segments, num_queries, query_1HLE, span))
        # Padding tokens take the row of zeros that `attend` appends to the results.
        self._sources_L = torch.tensor([i if i >= 0 else num_results for i in sources], device=device)

    def attend(
        self, query_1HLE: Tensor, key_1KLE: Tensor, value_1KLE: Tensor, scale: float, scores: ScoreModifiers = PLAIN
    ) -> Tensor:
        """Return softmax(scale * query key^T + log(forest_mask)) value, [1, L, H, E]; zeros for padding tokens."""
        query_LHE, key_LKE, value_LKE = (x[0].transpose(0, 1) for x in (query_1HLE, key_1KLE, value_1KLE))
        results = []
        for call in self.calls:
            inputs = ((query_LHE, call.queries), (key_LKE, call.keys), (value_LKE, call.keys))
            query, key, value = (
                _select(x, index).unflatten(0, (call.num_segments, -1)).transpose(1, 2) for x, index in inputs
            )
            out = scores.attend(query, key, value, call.mask, scale)
            results.append(out.transpose(1, 2).flatten(0, 1))
        results.append(query_LHE.new_zeros(1, *query_LHE.shape[1:]))
        return _select(torch.cat(results), self._sources_L)[None]


def _segments(nodes: Sequence[Node], span: Span) -> Iterator[Segment]:
    """Yield the segments that are not empty."""
    for prefix, node in zip(prefixes(nodes), nodes, strict=True):
        yield from _split(prefix, node.tokens, span)


def _split(prefix: Sequence[int], tokens: Sequence[int], span: Span) -> Iterator[Segment]:
    """Yield segments of `tokens`: all of them, or as many as a window or a chunk has."""
    every, step = [*prefix, *tokens], max(_LEAST_TOKENS, span.size or len(tokens))
    for begin in range(len(prefix), len(every), step):
        start = max(0, span.start(begin))
        yield Segment(every[start:begin], every[begin : begin + step], start, span)


def _buckets(nodes: Sequence[Node], span: Span) -> list[list[Segment]]:
    """Return the segments of each call, the segment with the most queries and keys first."""
    buckets: list[list[Segment]] = []
    bucket_scores = 0  # of the last bucket without its padding
    order = sorted(_segments(nodes, span), key=lambda s: (s.is_causal, len(s.queries), len(s.keys)), reverse=True)
    for segment in order:
        scores = len(segment.queries) * len(segment.keys)
        first = buckets[-1][0] if buckets else segment
        num_keys = max(len(first.keys), len(segment.keys))
        padded_keys = (len(buckets[-1]) + 1) * num_keys if buckets else 0
        fits = buckets and segment.is_causal == first.is_causal and padded_keys <= _MAX_KEYS
        if fits and bucket_scores + scores >= (1 - _MAX_PADDING) * padded_keys * len(first.queries):
            buckets[-1].append(segment)
            bucket_scores += scores
        else:
            buckets.append([segment])
            bucket_scores = scores
    return buckets


def _call(segments: Sequence[Segment], num_queries: int, query: Tensor, span: Span) -> SdpaCall:
    num_keys, device = max(len(segment.keys) for segment in segments), query.device
    queries = [index for segment in segments for index in _pad(segment.queries, num_queries)]
    keys = [index for segment in segments for index in _pad(segment.keys, num_keys)]
    mask = None
    if not segments[0].is_causal:
        # Only for chunks the mask depends on positions.
        cases = [(len(segment.prefix), segment.start * span.is_chunk) for segment in segments]
        cases_N2 = torch.tensor(cases if len(set(cases)) > 1 else cases[:1], device=device)
        prefixes_N11, starts_N11 = cases_N2.T[..., None, None]
        # The last key that each query attends to; a chunk's padding stays with the keys that there are.
        last = prefixes_N11 + torch.arange(num_queries, device=device)[:, None]
        last = last.clamp(max=num_keys - 1) if span.is_chunk else last
        keys_K = torch.arange(num_keys, device=device)
        masked = (keys_K > last) | (keys_K + starts_N11 < span.start(last + starts_N11))
        mask = torch.zeros(masked.shape, dtype=query.dtype, device=device).masked_fill_(masked, -torch.inf)[:, None]
    return SdpaCall(len(segments), torch.tensor(queries, device=device), torch.tensor(keys, device=device), mask)


def _pad(indices: list[int], length: int) -> list[int]:
    return indices + indices[-1:] * (length - len(indices))


def _select(x_LHX: Tensor, index: Tensor) -> Tensor:
    """Return `x_LHX[index]`."""
    # Flattened, because index_select copies rows of a matrix faster.
    return x_LHX.flatten(1).index_select(0, index).unflatten(1, x_LHX.shape[1:])

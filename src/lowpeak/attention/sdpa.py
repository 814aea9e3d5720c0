"""Attention over a forest off CUDA, by a few batched calls of torch's scaled_dot_product_attention.

Shapes: L packed tokens, H query heads, K key heads, E head width, N segments of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowpeak.records import Tree

# The largest fraction of a call's scores that may be padding, and its most keys; together they bound the copies' memory.
_MAX_PADDING = 0.25
_MAX_KEYS = 4096


@dataclass(frozen=True)
class Segment:
    """A completion with the prompt that it attends to, or a prompt alone; ranges of packed tokens."""

    prefix: range
    tokens: range

    @property
    def is_causal(self) -> bool:
        """Whether to recompute the prompt's queries too, so that no mask is needed.

        For a prompt of P tokens and a completion of C this costs (P + C)^2 / 2 scores, and a mask C (P + C).
        """
        return len(self.prefix) <= len(self.tokens)

    @property
    def queries(self) -> list[int]:
        """Indices of the queries among the packed tokens."""
        return self.keys if self.is_causal else [*self.tokens]

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

    def __init__(self, trees: Sequence[Tree], query_1HLE: Tensor) -> None:
        device, length = query_1HLE.device, query_1HLE.shape[2]
        self.calls: list[SdpaCall] = []
        sources, num_results = [-1] * length, 0
        for segments in _buckets(trees):
            num_queries = len(segments[0].queries)
            for segment in segments:
                first = num_results + (len(segment.prefix) if segment.is_causal else 0)
                sources[segment.tokens.start : segment.tokens.stop] = range(first, first + len(segment.tokens))
                num_results += num_queries
            self.calls.append(_call(segments, num_queries, query_1HLE))
        # Padding tokens take the row of zeros that `attend` appends to the results.
        self._sources_L = torch.tensor([i if i >= 0 else num_results for i in sources], device=device)

    def attend(self, query_1HLE: Tensor, key_1KLE: Tensor, value_1KLE: Tensor, scale: float) -> Tensor:
        """Return softmax(scale * query key^T + log(forest_mask)) value, [1, L, H, E]; zeros for padding tokens."""
        query_LHE, key_LKE, value_LKE = (x[0].transpose(0, 1) for x in (query_1HLE, key_1KLE, value_1KLE))
        results = []
        for call in self.calls:
            inputs = ((query_LHE, call.queries), (key_LKE, call.keys), (value_LKE, call.keys))
            query, key, value = (
                _select(x, index).unflatten(0, (call.num_segments, -1)).transpose(1, 2) for x, index in inputs
            )
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=call.mask, is_causal=call.mask is None, scale=scale, enable_gqa=True
            )
            results.append(out.transpose(1, 2).flatten(0, 1))
        results.append(query_LHE.new_zeros(1, *query_LHE.shape[1:]))
        return _select(torch.cat(results), self._sources_L)[None]


def _segments(trees: Sequence[Tree]) -> Iterator[Segment]:
    """Yield the segments that are not empty."""
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
    """Return the segments of each call, the segment with the most queries and keys first."""
    buckets: list[list[Segment]] = []
    bucket_scores = 0  # of the last bucket without its padding
    for segment in sorted(_segments(trees), key=lambda s: (s.is_causal, len(s.queries), len(s.keys)), reverse=True):
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


def _call(segments: Sequence[Segment], num_queries: int, query: Tensor) -> SdpaCall:
    num_keys, device = max(len(segment.keys) for segment in segments), query.device
    queries = [index for segment in segments for index in _pad(segment.queries, num_queries)]
    keys = [index for segment in segments for index in _pad(segment.keys, num_keys)]
    mask = None
    if not segments[0].is_causal:
        prefixes = [len(segment.prefix) for segment in segments]
        prefixes_N11 = torch.tensor(prefixes if len(set(prefixes)) > 1 else prefixes[:1], device=device)[:, None, None]
        # The last key that each query attends to.
        last = prefixes_N11 + torch.arange(num_queries, device=device)[:, None]
        masked = torch.arange(num_keys, device=device) > last
        mask = torch.zeros(masked.shape, dtype=query.dtype, device=device).masked_fill_(masked, -torch.inf)[:, None]
    return SdpaCall(len(segments), torch.tensor(queries, device=device), torch.tensor(keys, device=device), mask)


def _pad(indices: list[int], length: int) -> list[int]:
    return indices + indices[-1:] * (length - len(indices))


def _select(x_LHX: Tensor, index: Tensor) -> Tensor:
    """Return `x_LHX[index]`."""
    # Flattened, because index_select copies rows of a matrix faster.
    return x_LHX.flatten(1).index_select(0, index).unflatten(1, x_LHX.shape[1:])

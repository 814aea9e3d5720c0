"""CUDA graphs of decode steps: a forward of a small model waits for about a thousand kernel launches, a graph's for one.

A graph repeats the kernels of one forward with the same addresses and shapes. So sequences and columns come in coarse buckets, the
inputs are copied into tensors that stay, and graphs live as long as the KV cache that they read: one rollout.
Shapes: N sequences, M sequences of a bucket, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowpeak.rollout.native.cache import SlotCache

_logger = logging.getLogger(__name__)

# Takes tokens [N], their columns [N] and the columns to see; writes the tokens into the cache and returns logits [N, V].
DecodeStep = Callable[[Tensor, Tensor, int], Tensor]
# Runs a function once under capture, and returns the function that repeats its kernels.
Capture = Callable[[Callable[[], object]], Callable[[], None]]

_COLUMNS = 256  # of a bucket: a graph serves as many steps
_EAGER_STEPS = 2  # of a bucket before its graph is captured: kernel libraries choose and initialise their kernels


@dataclass(frozen=True)
class _Graph:
    tokens_M: Tensor
    columns_M: Tensor
    replay: Callable[[], None]


@dataclass(eq=False, repr=False)
class DecodeGraphs:
    """The graphs of a run's rollouts, of which `clear` drops those of the last one.

    A graph whose logits differ in a bit from those of the forward that it repeats, or a forward that cannot be captured, ends the
    use of graphs with a warning.
    """

    capture: Capture
    is_enabled: bool = True
    _graphs: dict[tuple[int, ...], _Graph] = field(default_factory=dict, init=False)
    _num_steps: Counter[tuple[int, ...]] = field(default_factory=Counter, init=False)
    _logits_SV: Tensor | None = field(default=None, init=False)  # of all graphs, for the cache's slots

    def clear(self) -> None:
        self._graphs.clear()
        self._num_steps.clear()
        self._logits_SV = None

    def run(self, step: DecodeStep, cache: SlotCache, tokens_N: Tensor, columns_N: Tensor, num_columns: int) -> Tensor:
        """Return the step's logits [N, V], by a graph once its bucket has one."""
        num_rows = len(tokens_N)
        rows = min(cache.num_slots, 1 << (num_rows - 1).bit_length())
        seen = min(cache.num_columns, -(-num_columns // _COLUMNS) * _COLUMNS)
        key = (rows, seen, cache.num_slots, cache.num_columns)
        graph = self._graphs.get(key)
        if graph is not None:
            graph.tokens_M[:num_rows].copy_(tokens_N)
            graph.columns_M[:num_rows].copy_(columns_N)
            graph.replay()
            return self._logits_SV[:num_rows]  # type: ignore[index]
        tokens_M, columns_M = _padded(tokens_N, rows), _padded(columns_N, rows)
        logits_MV = step(tokens_M, columns_M, seen)
        self._num_steps[key] += 1
        if self._num_steps[key] >= _EAGER_STEPS:
            self._add(key, step, tokens_M, columns_M, logits_MV)
        return logits_MV[:num_rows]

    def _add(
        self, key: tuple[int, ...], step: DecodeStep, tokens_M: Tensor, columns_M: Tensor, logits_MV: Tensor
    ) -> None:
        rows, seen, num_slots, _ = key
        if self._logits_SV is None or len(self._logits_SV) < num_slots:
            # The cache has more slots than before, so that no graph fits it any more.
            self._graphs.clear()
            self._logits_SV = logits_MV.new_empty(num_slots, logits_MV.shape[1])
        out_MV = self._logits_SV[:rows]
        try:
            replay = self.capture(lambda: out_MV.copy_(step(tokens_M, columns_M, seen)))
            replay()
            problem = "" if torch.equal(out_MV, logits_MV) else "its logits differ from those of the forward"
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
        if problem:
            self.is_enabled = False
            self.clear()
            _logger.warning("The rollout goes on without CUDA graphs, of a step of %d sequences: %s.", rows, problem)
        else:
            self._graphs[key] = _Graph(tokens_M, columns_M, replay)


def _padded(values_N: Tensor, number: int) -> Tensor:
    """Return the values and as many zeros as make `number`: rows that compute what nobody reads."""
    padded = values_N.new_zeros(number)
    padded[: len(values_N)] = values_N
    return padded


class CudaCapture:
    """Capture on a CUDA device, of all graphs into one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay

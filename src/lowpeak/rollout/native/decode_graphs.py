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
    """CUDA graphs of a rollout's decode steps; `clear` drops them when it ends.

    A graph whose logits differ in a bit from those of the forward that it repeats, or a forward that cannot be captured, ends the
    use of graphs in the run with a warning. `make_capture` is called for each set of graphs: torch refuses captures into a pool
    whose graphs are gone while tensors are left in it, such as a cache's.
    """

    make_capture: Callable[[], Capture]
    is_enabled: bool = True
    _capture: Capture | None = field(default=None, init=False)
    _graphs: dict[tuple[int, int], _Graph] = field(default_factory=dict, init=False)
    _num_steps: Counter[tuple[int, int]] = field(default_factory=Counter, init=False)
    _logits_SV: Tensor | None = field(default=None, init=False)  # of all graphs, for the cache's slots

    def clear(self) -> None:
        self._graphs.clear()
        self._num_steps.clear()
        self._capture = self._logits_SV = None

    def run(self, step: DecodeStep, cache: SlotCache, tokens_N: Tensor, columns_N: Tensor, num_columns: int) -> Tensor:
        """Return the step's logits [N, V], by a graph once its bucket has one."""
        if self._logits_SV is not None and len(self._logits_SV) != cache.num_slots:
            self.clear()  # the cache was laid out anew
        num_rows = len(tokens_N)
        rows = min(cache.num_slots, 1 << (num_rows - 1).bit_length())
        seen = min(cache.num_columns, -(-num_columns // _COLUMNS) * _COLUMNS)
        graph = self._graphs.get((rows, seen))
        if graph is not None:
            graph.tokens_M[:num_rows].copy_(tokens_N)
            graph.columns_M[:num_rows].copy_(columns_N)
            graph.replay()
            return self._logits_SV[:num_rows]  # type: ignore[index]
        tokens_M, columns_M = _padded(tokens_N, rows), _padded(columns_N, rows)
        logits_MV = step(tokens_M, columns_M, seen)
        self._num_steps[rows, seen] += 1
        if self._num_steps[rows, seen] >= _EAGER_STEPS:
            if self._logits_SV is None:
                self._logits_SV = logits_MV.new_empty(cache.num_slots, logits_MV.shape[1])
            self._add(step, tokens_M, columns_M, seen, logits_MV, self._logits_SV[:rows])
        return logits_MV[:num_rows]

    def _add(
        self, step: DecodeStep, tokens_M: Tensor, columns_M: Tensor, seen: int, logits_MV: Tensor, out_MV: Tensor
    ) -> None:
        try:
            self._capture = self._capture or self.make_capture()
            replay = self._capture(lambda: out_MV.copy_(step(tokens_M, columns_M, seen)))
            replay()
            problem = "" if torch.equal(out_MV, logits_MV) else "a graph's logits differ from the forward's"
        except RuntimeError as error:
            problem = f"no graph was captured ({str(error).partition(chr(10))[0]})"
        if problem:
            self.is_enabled = False
            self.clear()
            _logger.warning(
                "cuda_graphs: the run goes on without graphs, because for %d sequences %s. Set cuda_graphs=False.",
                len(tokens_M),
                problem,
            )
        else:
            self._graphs[len(tokens_M), seen] = _Graph(tokens_M, columns_M, replay)


def _padded(values_N: Tensor, number: int) -> Tensor:
    """Return the values, padded with zeros to `number`: nobody reads the rows that they compute."""
    padded = values_N.new_zeros(number)
    padded[: len(values_N)] = values_N
    return padded


class CudaCapture:
    """Capture on a CUDA device, of a set of graphs into one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay

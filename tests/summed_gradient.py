"""A gradient sink in memory, for tests of what delivers gradients to it."""

from __future__ import annotations

import torch
from torch import Tensor

from lowpeak.logprobs.inplace_grad import GradientSink


class SummedGradient(GradientSink):
    """A parameter's gradient in fp64, outside its `.grad`, with the hook for what autograd accumulates.

    `rows` are the ranges that came in stripes, `selected` the ids that came one by one, and `accumulated` counts whole
    gradients from autograd.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.total = torch.zeros_like(parameter, dtype=torch.float64)
        self.rows: list[range] = []
        self.selected: list[int] = []
        self.accumulated = 0
        setattr(parameter, "gradient_sink", self)  # noqa: B010
        parameter.register_post_accumulate_grad_hook(self.take)

    def take(self, parameter: Tensor) -> None:
        # Autograd calls hooks after a gradient of None, too.
        if parameter.grad is None:
            return
        self.total += parameter.grad
        self.accumulated += 1
        parameter.grad = None

    def add_rows(self, start: int, values_SD: Tensor) -> None:
        self.rows.append(range(start, start + len(values_SD)))
        self.total[start : start + len(values_SD)] += values_SD

    def add_selected_rows(self, ids_N: Tensor, values_ND: Tensor) -> None:
        self.selected += ids_N.tolist()
        self.total.index_add_(0, ids_N, values_ND.double())

    def each_row_once(self, times: int) -> bool:
        """Whether the stripes cover each row `times` times, in several stripes if there are many rows."""
        return sorted(number for stripe in self.rows for number in stripe) == sorted([*range(len(self.total))] * times)


class CountedRows(GradientSink):
    """A sink without memory: it counts the rows that it is given."""

    def __init__(self, parameter: Tensor) -> None:
        self.num_rows = self.num_selected = 0
        setattr(parameter, "gradient_sink", self)  # noqa: B010

    def add_rows(self, start: int, values_SD: Tensor) -> None:
        self.num_rows += len(values_SD)

    def add_selected_rows(self, ids_N: Tensor, values_ND: Tensor) -> None:
        self.num_selected += len(ids_N)

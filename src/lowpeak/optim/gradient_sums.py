"""Sums of gradients outside of `.grad`: in host memory, or in another dtype than the weights'.

A hook adds each gradient to its parameter's sum as soon as backward has formed it, and frees it: of all gradients at most those of
one module are on the device. The sum over micro-batches is complete before its norm is taken, so clipping is exact. `logprobs` adds
the gradients of the head and the embeddings in stripes: it finds the sum as the attribute `gradient_sink` of their parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowpeak.optim.host_memory import HostMemory


class GradientSum:
    """The sum of a parameter's gradients over a step's micro-batches: of this rank's shard, flat.

    It is in `host` memory, or (None) beside the weights, where it takes no memory before a step's first gradient. `factor` is a
    pending scale, which is applied when the sum is copied to the device.

        total = GradientSum(parameter, torch.float32)
        loss.backward()                                              # once per micro-batch: a hook adds the gradient
        total.multiply(factor)                                       # clipping, when all gradients are added
        update(parameter, total.total())
        total.clear()                                                # before the next step
        total.remove()                                               # `.grad` has the gradients again
    """

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype, host: HostMemory | None = None) -> None:
        self._parameter, self._dtype, self._host = parameter, dtype, host
        self._buffer: Tensor | None = None
        self._is_empty = True
        self.factor: Tensor | None = None
        self._hook = parameter.register_post_accumulate_grad_hook(_take_gradient)
        parameter.gradient_sink = self  # type: ignore[attr-defined]

    def total(self) -> Tensor | None:
        """Return the sum, flat, when all gradients are added; None if the step has none so far."""
        if self._is_empty:
            return None
        if self._host is not None:
            self._host.wait_for_sums()
        return self._buffer

    def add(self, start: int, values: Tensor) -> None:
        """Add flat values to positions [start, start + len(values)) of this rank's shard."""
        total = self._begin(values.numel())[start : start + values.numel()]
        if self._host is not None:
            self._host.add(total, values, overwrite=self._is_empty)
        elif self._is_empty:
            total.copy_(values)
        else:
            total.add_(values)
        self._is_empty = False

    def add_rows(self, start: int, values_SD: Tensor) -> None:
        """Add to rows [start, start + S) of the parameter."""
        self.add(start * values_SD.shape[1], values_SD.reshape(-1))

    def add_selected_rows(self, ids_N: Tensor, values_ND: Tensor) -> None:
        """Add each row of `values` to the row of its id; ids may repeat."""
        total_VD = self._begin(0).view(-1, values_ND.shape[1])
        if self._host is not None:
            self._host.add_rows(total_VD, ids_N, values_ND)
        elif total_VD.is_cuda:
            # index_put_ sorts the ids: the same sums in every run.
            total_VD.index_put_((ids_N,), values_ND.to(total_VD.dtype), accumulate=True)
        else:
            total_VD.index_add_(0, ids_N, values_ND.to(total_VD.dtype))

    def zero(self) -> Tensor:
        """Return the sum of a step without a gradient: zeros."""
        return self._begin(0)

    def multiply(self, factor: Tensor) -> None:
        """Multiply the sum by a factor, at the latest when it visits the device."""
        total = self.total()
        if total is not None and self._host is not None:
            self.factor = self._host.multiply(total, factor)
        elif total is not None:
            total.mul_(factor.to(total.device))

    def clear(self) -> None:
        """Forget the sum; a buffer beside the weights is freed, host memory is kept for the next step."""
        self._is_empty, self.factor = True, None
        if self._host is None:
            self._buffer = None

    def remove(self) -> None:
        """Leave the parameter's gradients to `.grad` again."""
        self._hook.remove()
        del self._parameter.gradient_sink  # type: ignore[attr-defined]

    def _begin(self, covered: int) -> Tensor:
        """Return the buffer; zeros, if the step's first gradient covers only a part of it."""
        if self._buffer is None:
            local = local_part(self._parameter)
            empty = local.new_empty if self._host is None else self._host.empty
            self._buffer = empty(local.numel(), dtype=self._dtype)
        if self._is_empty and covered < self._buffer.numel():
            if self._host is not None:
                self._host.synchronize()
            self._buffer.zero_()
            self._is_empty = False
        return self._buffer


def find_sum(parameter: nn.Parameter) -> GradientSum | None:
    """Return the GradientSum of a parameter; None if its gradients are in `.grad`."""
    return getattr(parameter, "gradient_sink", None)


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Return this rank's gradient of a parameter, flat: its GradientSum's total, or its `.grad`; None without one."""
    found, gradient = find_sum(parameter), parameter.grad
    if found is not None:
        return found.total()
    return None if gradient is None else flat_part(gradient)


def multiply_gradient(parameter: nn.Parameter, factor: Tensor) -> None:
    """Multiply a parameter's gradient in place."""
    found, gradient = find_sum(parameter), parameter.grad
    if found is not None:
        found.multiply(factor)
    elif gradient is not None:
        local = local_part(gradient)
        local.mul_(factor.to(local.device))


def _take_gradient(parameter: nn.Parameter) -> None:
    gradient, found = parameter.grad, find_sum(parameter)
    # Autograd also calls the hook of a head or embedding that has added its gradient in stripes, and so returned none.
    if gradient is not None and found is not None:
        parameter.grad = None
        found.add(0, flat_part(gradient))


def flat_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as one dimension, detached."""
    return local_part(tensor).reshape(-1)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()

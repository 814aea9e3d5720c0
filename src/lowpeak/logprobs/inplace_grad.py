"""In-place accumulation of a [V, D] gradient into `.grad`, so that no second matrix of that size exists.

Autograd allocates one for the head in each micro-batch and another for the embeddings, and adds them up. One device that
holds the whole parameter needs neither. Autograd's way stays if anything must see the gradient before it is accumulated:
a hook, a reduction over ranks, or a loss scale that may overflow. A parameter with a `GradientSink` has its sum
elsewhere, and then no such matrix exists on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_embeddings_inplace: ContextVar[bool] = ContextVar("embeddings_inplace", default=False)


class GradientSink(Protocol):
    """A sum of a parameter's gradient outside its `.grad`, to which gradients are added as they are formed.

    It is the parameter's attribute `gradient_sink`. In-place gradients come by these methods, the head's in fp32 at least.
    One post-accumulate hook of the parameter delivers what autograd accumulates. Autograd calls that hook after an
    in-place gradient too, with no `.grad`.
    """

    def add_rows(self, start: int, values_SD: Tensor) -> None:
        """Add to rows [start, start + S); the caller may reuse or free the values at once."""

    def add_selected_rows(self, ids_N: Tensor, values_ND: Tensor) -> None:
        """Add each row of the values to the row of its id; ids may repeat."""


def gradient_sink(parameter: Tensor) -> GradientSink | None:
    """Return the sink that sums this parameter's gradient, if it has one."""
    return getattr(parameter, "gradient_sink", None)


def allows_inplace_grad(parameter: Tensor) -> bool:
    """Return whether a gradient may bypass autograd's accumulation: a plain leaf, trained, without hooks but its sink's.

    Hooks on the node that accumulates (DDP's) are not visible here: a strategy with such hooks sets no `inplace_grad_scale`.
    """
    if not (parameter.is_leaf and parameter.requires_grad) or torch.compiler.is_compiling():
        return False
    if hasattr(type(parameter), "__tensor_flatten__") or parameter.layout != torch.strided:
        return False
    # Both are None or empty unless a hook was registered.
    hooks_after = getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
    if parameter._backward_hooks or len(hooks_after) > (gradient_sink(parameter) is not None):
        return False
    return parameter.grad is None or _accumulates(parameter.grad, parameter)


def _accumulates(grad: Tensor, parameter: Tensor) -> bool:
    return grad.dtype == parameter.dtype and grad.layout == torch.strided and not grad.requires_grad


@contextmanager
def inplace_embedding_grads(allowed: bool) -> Iterator[None]:
    """Let patched embedding modules call `inplace_grad_embedding` inside this context, if `allowed`."""
    token = _embeddings_inplace.set(allowed)
    try:
        yield
    finally:
        _embeddings_inplace.reset(token)


def allows_inplace_embedding(module: nn.Embedding) -> bool:
    """Return whether `inplace_grad_embedding` may replace this module's forward in this call."""
    # Compiled code cannot read a context variable.
    if torch.compiler.is_compiling() or not _embeddings_inplace.get():
        return False
    plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return plain and torch.is_grad_enabled() and allows_inplace_grad(module.weight)


def inplace_grad_embedding(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Return `module(ids)`; backward adds the gradients to the weight's sink if it has one, else to its `.grad`."""
    return _Embedding.apply(module.weight, ids, module.padding_idx)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        # The weight is not a saved tensor: backward uses only its `.grad` or its sink.
        ctx.weight_VD, ctx.padding_idx = weight_VD, padding_idx
        ctx.save_for_backward(ids)
        return nn.functional.embedding(ids, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        weight_VD: Tensor = ctx.weight_VD
        ids_N, grad_ND = ids.reshape(-1), grad.reshape(-1, weight_VD.shape[1]).to(weight_VD.dtype)
        if ctx.padding_idx is not None:
            grad_ND = grad_ND.masked_fill((ids_N == ctx.padding_idx)[:, None], 0)
        sink = gradient_sink(weight_VD)
        if sink is not None:
            sink.add_selected_rows(ids_N, grad_ND)
            return None, None, None
        if weight_VD.grad is None:
            weight_VD.grad = torch.zeros_like(weight_VD)
        if grad_ND.is_cuda:
            # index_put_ sorts the ids: the same sums in every run.
            weight_VD.grad.index_put_((ids_N,), grad_ND, accumulate=True)
        else:
            weight_VD.grad.index_add_(0, ids_N, grad_ND)
        return None, None, None

"""Gradients of a [V, D] matrix added to its `.grad` where they are formed, so that no second matrix of that size exists.

Autograd makes one for the head in each micro-batch and another for the embeddings, and adds them up. One device that
holds the whole parameter needs neither; anything that must see the gradient on its way (a hook, a reduction over ranks,
a loss scale that may overflow) does, and then autograd's way stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_direct_lookups: ContextVar[bool] = ContextVar("direct_lookups", default=False)


def takes_direct(parameter: Tensor) -> bool:
    """Whether a gradient may be added to `parameter.grad` with nobody noticing: a plain leaf, trained, without hooks.

    Hooks on the node that accumulates (DDP's) cannot be seen from here: a strategy that has them promises no scale.
    """
    if not (parameter.is_leaf and parameter.requires_grad) or torch.compiler.is_compiling():
        return False
    if hasattr(type(parameter), "__tensor_flatten__") or parameter.layout != torch.strided:
        return False
    # Both are None or empty unless somebody registered one.
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return False
    return parameter.grad is None or _adds_in_place(parameter.grad, parameter)


def _adds_in_place(grad: Tensor, parameter: Tensor) -> bool:
    return grad.dtype == parameter.dtype and grad.layout == torch.strided and not grad.requires_grad


@contextmanager
def direct_lookups(allowed: bool) -> Iterator[None]:
    """While open, `lookup` may be used in place of embedding modules' forwards."""
    token = _direct_lookups.set(allowed)
    try:
        yield
    finally:
        _direct_lookups.reset(token)


def looks_up_directly(module: nn.Embedding) -> bool:
    """Whether `lookup` may stand in for this module's forward in this call."""
    if torch.compiler.is_compiling() or not _direct_lookups.get():  # what is compiled cannot read the variable
        return False
    plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return plain and torch.is_grad_enabled() and takes_direct(module.weight)


def lookup(module: nn.Embedding, ids: Tensor) -> Tensor:
    """`module(ids)`, whose backward adds the rows' gradients to `module.weight.grad`."""
    return _Lookup.apply(module.weight, ids, module.padding_idx)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.weight_VD, ctx.padding_idx = weight_VD, padding_idx  # not saved: only its `.grad` is touched
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
        if weight_VD.grad is None:
            weight_VD.grad = torch.zeros_like(weight_VD)
        if grad_ND.is_cuda:
            weight_VD.grad.index_put_((ids_N,), grad_ND, accumulate=True)  # sorted: the same sums in every run
        else:
            weight_VD.grad.index_add_(0, ids_N, grad_ND)
        return None, None, None

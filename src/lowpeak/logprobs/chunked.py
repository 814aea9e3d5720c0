"""Log-probs and entropies of chosen targets from hidden states and a plain linear head, without [T, V] ever existing.

Naive equivalent of everything here: `definition.naive_logprobs`. `chunked_logprobs` visits the head again in backward
(four head products); `one_visit` forms a per-token loss and all gradients where the logits are (three). Both hold one
chunk's logits. Sums over the vocabulary and over tokens are fp32; sizes are numbers, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowpeak.logprobs.definition import ChunkSettings
from lowpeak.logprobs.products import HeadGradients, wide_dtype
from lowpeak.logprobs.visit import HeadVisit

# (logprobs_C, entropy_C or None, start, stop) -> the scalar sum of the losses of tokens [start, stop)
TokenLoss = Callable[[Tensor, Tensor | None, int, int], Tensor]


def chunked_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor, settings: ChunkSettings
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T] and entropies [T] (None unless asked), both differentiable, the entropy where `entropy_grad` says.

    Computed in hidden's dtype (autocast's, where it is on, as a linear layer would be), returned in fp32.
    """
    hidden_TD = autocast_hidden(hidden_TD)
    with no_autocast(hidden_TD.device):
        if not _wants_gradient(hidden_TD, weight_VD, bias_V):
            return _values(hidden_TD, weight_VD, bias_V, targets_T, settings)
        return _Recomputed.apply(hidden_TD, weight_VD, bias_V, targets_T, settings)


def one_visit(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    loss: TokenLoss,
    settings: ChunkSettings,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`sum(loss(chunk))` over chunks, a differentiable scalar, with the detached log-probs and entropies [T].

    Gradients of hidden, weight and bias are formed with the logits and only scaled in backward, which can run once.
    `loss` must be a sum over its tokens; it may depend on nothing differentiable but what it is given.
    """
    hidden_TD = autocast_hidden(hidden_TD)
    with no_autocast(hidden_TD.device):
        if _wants_gradient(hidden_TD, weight_VD, bias_V):
            return _Visited.apply(hidden_TD, weight_VD, bias_V, targets_T, loss, settings)
        logprobs_T, entropy_T = _values(hidden_TD, weight_VD, bias_V, targets_T, settings)
        total = logprobs_T.new_zeros(())
        for start, stop in settings.spans(len(targets_T)):
            total = total + loss(logprobs_T[start:stop], _cut(entropy_T, start, stop), start, stop)
        return total, logprobs_T, entropy_T


def autocast_hidden(hidden_TD: Tensor) -> Tensor:
    """Hidden states as a linear layer would take them: cast where autocast is on, fp64 aside, else unchanged."""
    device_type = hidden_TD.device.type
    if not torch.is_autocast_enabled(device_type) or hidden_TD.dtype == torch.float64:
        return hidden_TD
    return hidden_TD.to(torch.get_autocast_dtype(device_type))


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which operations keep the dtypes they are given."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


class _Recomputed(torch.autograd.Function):
    """Saves its inputs and visits the head again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        settings: ChunkSettings,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, targets_T)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        logprobs_T, entropy_T = _values(hidden_TD, weight_VD, bias_V, targets_T, settings)
        if entropy_T is not None and not settings.entropy_grad:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, targets_T = ctx.saved_tensors
        if grad_logprobs_T is None:
            if grad_entropy_T is None:
                return None, None, None, None, None
            grad_logprobs_T = torch.zeros_like(grad_entropy_T)
        sums = HeadGradients.zeros(hidden_TD, weight_VD, ctx.needs_input_grad[:3])
        with no_autocast(hidden_TD.device):
            visit = _visit(hidden_TD, weight_VD, bias_V, ctx.settings, for_gradients=True)
            for start, stop in ctx.settings.spans(len(targets_T)):
                visit.values(hidden_TD[start:stop], targets_T[start:stop])
                visit.gradients(
                    grad_logprobs_T[start:stop], _cut(grad_entropy_T, start, stop), sums, slice(start, stop)
                )
            del visit  # its buffers need not stand beside the finished gradients
        return *sums.scaled(None, _dtypes(hidden_TD, weight_VD, bias_V)), None, None


class _Visited(torch.autograd.Function):
    """Forms the loss and all gradients in one visit to each chunk; backward scales the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        loss: TokenLoss,
        settings: ChunkSettings,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        sums = HeadGradients.zeros(hidden_TD, weight_VD, ctx.needs_input_grad[:3])
        visit = _visit(hidden_TD, weight_VD, bias_V, settings, for_gradients=True)
        logprobs_T, entropy_T = _empty_values(hidden_TD, settings)
        total = logprobs_T.new_zeros(())
        for start, stop in settings.spans(len(targets_T)):
            logprobs_C, entropy_C = visit.values(hidden_TD[start:stop], targets_T[start:stop])
            loss_C, by_logprobs_C, by_entropy_C = _loss_derivatives(
                loss, logprobs_C, entropy_C, start, stop, settings.entropy_grad
            )
            visit.gradients(by_logprobs_C, by_entropy_C, sums, slice(start, stop))
            total += loss_C
            _keep(logprobs_T, entropy_T, logprobs_C, entropy_C, start, stop)
        # Kept on ctx, not as saved tensors: they are used next, so nothing should offload them or check their versions.
        ctx.sums, ctx.dtypes = sums, _dtypes(hidden_TD, weight_VD, bias_V)
        ctx.mark_non_differentiable(*(x for x in (logprobs_T, entropy_T) if x is not None))
        return total, logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.sums is None:
            raise RuntimeError("the gradients of a one-visit loss were used up by its first backward; visit again")
        sums, ctx.sums = ctx.sums, None
        return *sums.scaled(grad_loss, ctx.dtypes), None, None, None


def _loss_derivatives(
    loss: TokenLoss, logprobs_C: Tensor, entropy_C: Tensor | None, start: int, stop: int, entropy_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The chunk's loss and its derivative by each log-prob and, where wanted, each entropy."""
    with torch.enable_grad():
        logprobs_C = logprobs_C.detach().requires_grad_()
        if entropy_C is not None:
            entropy_C = entropy_C.detach().requires_grad_(entropy_grad)
        value = loss(logprobs_C, entropy_C, start, stop)
        leaves = [logprobs_C] + ([entropy_C] if entropy_grad and entropy_C is not None else [])
        if not value.requires_grad:  # a constant: every token of the chunk is masked or clipped away
            return value, torch.zeros_like(logprobs_C), None
        found = torch.autograd.grad(value, leaves, allow_unused=True)
    by_logprobs_C = found[0] if found[0] is not None else torch.zeros_like(logprobs_C)
    return value.detach(), by_logprobs_C, found[1] if len(found) == 2 else None


@torch.no_grad()
def _values(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor, settings: ChunkSettings
) -> tuple[Tensor, Tensor | None]:
    visit = _visit(hidden_TD, weight_VD, bias_V, settings, for_gradients=False)
    logprobs_T, entropy_T = _empty_values(hidden_TD, settings)
    for start, stop in settings.spans(len(targets_T)):
        logprobs_C, entropy_C = visit.values(hidden_TD[start:stop], targets_T[start:stop])
        _keep(logprobs_T, entropy_T, logprobs_C, entropy_C, start, stop)
    return logprobs_T, entropy_T


def _visit(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, settings: ChunkSettings, for_gradients: bool
) -> HeadVisit:
    # The head is cast once per pass, into hidden's dtype.
    num_rows = min(settings.chunk_size, len(hidden_TD))
    return HeadVisit(weight_VD.to(hidden_TD.dtype), bias_V, settings, num_rows, for_gradients)


def _empty_values(hidden_TD: Tensor, settings: ChunkSettings) -> tuple[Tensor, Tensor | None]:
    logprobs_T = hidden_TD.new_empty(len(hidden_TD), dtype=wide_dtype(hidden_TD.dtype))
    return logprobs_T, torch.empty_like(logprobs_T) if settings.entropy else None


def _keep(
    logprobs_T: Tensor, entropy_T: Tensor | None, logprobs_C: Tensor, entropy_C: Tensor | None, start: int, stop: int
) -> None:
    logprobs_T[start:stop] = logprobs_C
    if entropy_T is not None:
        assert entropy_C is not None
        entropy_T[start:stop] = entropy_C


def _dtypes(*inputs: Tensor | None) -> list[torch.dtype | None]:
    return [None if x is None else x.dtype for x in inputs]


def _cut(values_T: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if values_T is None else values_T[start:stop]


def _wants_gradient(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)

"""Log-probs and entropies of targets from hidden states, chunk by chunk, without logits of shape [T, V].

`reference.naive_logprobs` is the naive equivalent. For a plain linear head, `chunked_logprobs` recomputes the logits in
backward (four head products) and `fused_loss` forms a per-token loss and all gradients along with them (three). For any
other head `module_logprobs` and `module_loss` recompute by activation checkpointing. All keep one chunk's logits alive.
Sums over the vocabulary and over tokens are fp32; sizes are Python numbers, so nothing waits for the device.

With z = scale(hidden @ weight.T + bias) / temperature, p = softmax(z), H = -sum(p log p) and targets t:

    d logprob / dz_v = [v = t] - p_v          d H / dz_v = -p_v (log p_v + H)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lowpeak.logprobs.inplace_grad import allows_inplace_grad
from lowpeak.logprobs.kernels import kernels_for
from lowpeak.logprobs.matmul import (
    HeadGradients,
    cast_for_autocast,
    has_wide_product,
    no_autocast,
    project,
    wide_dtype,
)
from lowpeak.logprobs.reference import ChunkSettings, is_top1, logprobs_and_entropy
from lowpeak.logprobs.torch_kernels import LossDerivatives

# (logprobs_C, entropy_C or None, start, stop) -> the scalar sum of the losses of tokens [start, stop)
TokenLoss = Callable[[Tensor, Tensor | None, int, int], Tensor]
Head = Callable[[Tensor], Tensor]  # hidden_CD -> logits_CV
LogprobsAndEntropy = tuple[Tensor, Tensor | None]


def chunked_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor, settings: ChunkSettings
) -> LogprobsAndEntropy:
    """Return log-probs [T] and, if asked, entropies [T], differentiable (the entropies with `entropy_grad` only).

    Computed in hidden's dtype (autocast's inside autocast, as in a linear layer), returned in fp32. With a
    `inplace_grad_scale` backward adds the head's gradient to its `.grad`.
    """
    hidden_TD = cast_for_autocast(hidden_TD)
    with no_autocast(hidden_TD.device):
        if not _needs_gradient(hidden_TD, weight_VD, bias_V):
            return _without_gradient(hidden_TD, weight_VD, bias_V, targets_T, settings)
        return _Recomputed.apply(hidden_TD, weight_VD, bias_V, targets_T, settings)


def fused_loss(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    loss: TokenLoss,
    settings: ChunkSettings,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `sum(loss(chunk))` over chunks, a differentiable scalar, and detached log-probs and entropies [T].

    Gradients of hidden, weight and bias are formed in forward, and backward, which can run once, only scales them.
    `loss` must be a sum over its tokens, differentiable in nothing but its arguments.

    With a `inplace_grad_scale` forward adds the head's gradient, times that scale, to its `.grad`. Backward fails if the
    loss's gradient is not that scale: RuntimeError on a CPU; on CUDA a device assertion, which ends the process. After an
    error between forward and backward the `.grad` stays changed: zero the gradients, as after any step that was aborted
    between two micro-batches.
    """
    hidden_TD = cast_for_autocast(hidden_TD)
    with no_autocast(hidden_TD.device):
        if _needs_gradient(hidden_TD, weight_VD, bias_V):
            return _FusedLoss.apply(hidden_TD, weight_VD, bias_V, targets_T, loss, settings)
        logprobs_T, entropy_T = _without_gradient(hidden_TD, weight_VD, bias_V, targets_T, settings)
        total = logprobs_T.new_zeros(())
        for start, stop in settings.spans(len(targets_T)):
            total = total + loss(logprobs_T[start:stop], _slice(entropy_T, start, stop), start, stop)
        return total, logprobs_T, entropy_T


class _Recomputed(torch.autograd.Function):
    """Log-probs and entropies whose logits are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        settings: ChunkSettings,
    ) -> LogprobsAndEntropy:
        # Not a saved tensor, which saved-tensor hooks may replace: backward may add to this parameter's `.grad`.
        ctx.weight_VD = weight_VD
        ctx.save_for_backward(hidden_TD, bias_V, targets_T)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        logprobs_T, entropy_T = _without_gradient(hidden_TD, weight_VD, bias_V, targets_T, settings)
        if entropy_T is not None and not settings.entropy_grad:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        (hidden_TD, bias_V, targets_T), weight_VD = ctx.saved_tensors, ctx.weight_VD
        if grad_logprobs_T is None:
            if grad_entropy_T is None:
                return None, None, None, None, None
            grad_logprobs_T = torch.zeros_like(grad_entropy_T)
        settings, wanted = ctx.settings, ctx.needs_input_grad[:3]
        inplace = settings.inplace_grad_scale is not None and allows_inplace_grad(weight_VD)
        with no_autocast(hidden_TD.device):
            gradients = HeadGradients(hidden_TD, weight_VD, wanted, inplace)
            head = _ChunkedHead(weight_VD, bias_V, settings, hidden_TD, for_gradients=True)
            for start, stop in settings.spans(len(targets_T)):
                head.forward(hidden_TD[start:stop], targets_T[start:stop])
                derivatives = grad_logprobs_T[start:stop], _slice(grad_entropy_T, start, stop)
                head.backward(*derivatives, gradients, slice(start, stop))
        return *gradients.finish(None, _dtypes(hidden_TD, weight_VD, bias_V)), None, None


class _FusedLoss(torch.autograd.Function):
    """A loss whose gradients are formed in forward, chunk by chunk; backward scales them."""

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
        scale = settings.inplace_grad_scale if allows_inplace_grad(weight_VD) else None
        gradients = HeadGradients(hidden_TD, weight_VD, ctx.needs_input_grad[:3], inplace=scale is not None)
        head = _ChunkedHead(weight_VD, bias_V, settings, hidden_TD, for_gradients=True)
        logprobs_T, entropy_T = _empty_results(hidden_TD, settings)
        total = logprobs_T.new_zeros(())
        for start, stop in settings.spans(len(targets_T)):
            results = head.forward(hidden_TD[start:stop], targets_T[start:stop])
            loss_C, derivatives = _loss_derivatives(loss, results, (start, stop), settings, scale)
            head.backward(*derivatives, gradients, slice(start, stop))
            total += loss_C
            _store(logprobs_T, entropy_T, *results, start, stop)
            if settings.is_top1_T is not None:
                settings.is_top1_T[start:stop] = head.is_top1()
        # Not saved tensors: backward uses these next, so nothing should offload them or check their versions.
        ctx.gradients, ctx.dtypes, ctx.scale = gradients, _dtypes(hidden_TD, weight_VD, bias_V), scale
        if scale is not None:
            gradients.store_weight()
        ctx.mark_non_differentiable(*(x for x in (logprobs_T, entropy_T) if x is not None))
        return total, logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("backward ran twice through one fused loss, whose first backward used its gradients up")
        gradients, ctx.gradients = ctx.gradients, None
        if ctx.scale is None:
            return *gradients.finish(grad_loss, ctx.dtypes), None, None, None
        is_promised = (grad_loss - ctx.scale).abs() <= 1e-6 * abs(ctx.scale)
        torch._assert_async(is_promised, f"the loss's gradient is not the scale {ctx.scale} that forward was given")
        return *gradients.finish(None, ctx.dtypes), None, None, None


class _ChunkedHead:
    """A linear head run on one chunk after another: `forward`, then optionally `backward`, which consumes its logits.

    All chunks share one [C, V] buffer (and a second, in bf16, for gradients in the tensor cores).
    """

    def __init__(
        self, weight_VD: Tensor, bias_V: Tensor | None, settings: ChunkSettings, hidden_TD: Tensor, for_gradients: bool
    ) -> None:
        # For tensor cores the head is cast once per pass; elsewhere the products cast it a stripe at a time.
        casts = has_wide_product(hidden_TD)
        self._weight_VD = weight_VD.to(hidden_TD.dtype) if casts else weight_VD
        self._bias_V, self._settings = bias_V, settings
        shape = (min(settings.chunk_size, len(hidden_TD)), weight_VD.shape[0])
        self._logits = hidden_TD.new_empty(shape, dtype=wide_dtype(hidden_TD.dtype))
        self._narrow = hidden_TD.new_empty(shape) if casts and for_gradients else None
        self._kernels = kernels_for(self._logits)

    def forward(self, hidden_CD: Tensor, targets_C: Tensor) -> LogprobsAndEntropy:
        """Return the chunk's log-probs and, if asked, entropies: [C] and [C]."""
        self._hidden_CD, self._targets_C = hidden_CD, targets_C
        logits_CV = self._logits[: len(hidden_CD)]
        project(logits_CV, hidden_CD, self._weight_VD)
        self._chosen_C = self._kernels.target_logits(logits_CV, self._bias_V, targets_C, self._settings)
        self._statistics = self._kernels.softmax_statistics(logits_CV, self._bias_V, self._settings)
        self._entropy_C = self._statistics.entropy()
        return self._statistics.logprobs(self._chosen_C), self._entropy_C

    def is_top1(self) -> Tensor:
        """Return whether the chunk's targets have the greatest logits: bool [C]."""
        return self._statistics.is_top1(self._chosen_C)

    def backward(
        self, by_logprobs_C: Tensor, by_entropy_C: Tensor | None, gradients: HeadGradients, chunk: slice
    ) -> None:
        """Add the chunk's part to `gradients`, given the loss's derivatives by its log-probs and entropies."""
        logits_CV = self._logits[: len(self._hidden_CD)]
        derivatives = LossDerivatives(by_logprobs_C, by_entropy_C, self._entropy_C)
        narrow_CV = None if self._narrow is None else self._narrow[: len(logits_CV)]
        inputs = (self._bias_V, self._settings, self._targets_C, self._statistics, derivatives)
        grad_CV = self._kernels.logits_gradient_(logits_CV, *inputs, narrow_CV)
        gradients.add(chunk, grad_CV, narrow_CV, self._hidden_CD, self._weight_VD)


def _loss_derivatives(
    loss: TokenLoss,
    results: LogprobsAndEntropy,
    span: tuple[int, int],
    settings: ChunkSettings,
    scale: float | None,
) -> tuple[Tensor, LogprobsAndEntropy]:
    """Return the chunk's loss, and its derivatives times `scale` by log-probs and, with `entropy_grad`, entropies."""
    with torch.enable_grad():
        logprobs_C, entropy_C = results[0].detach().requires_grad_(), results[1]
        if entropy_C is not None:
            entropy_C = entropy_C.detach().requires_grad_(settings.entropy_grad)
        value = loss(logprobs_C, entropy_C, *span)
        leaves = [logprobs_C] + ([entropy_C] if settings.entropy_grad and entropy_C is not None else [])
        # A constant loss: every token of the chunk is masked or clipped away.
        if not value.requires_grad:
            return value, (torch.zeros_like(logprobs_C), None)
        grads = torch.autograd.grad(value if scale is None else value * scale, leaves, allow_unused=True)
    by_logprobs_C = grads[0] if grads[0] is not None else torch.zeros_like(logprobs_C)
    return value.detach(), (by_logprobs_C, grads[1] if len(grads) == 2 else None)


@torch.no_grad()
def _without_gradient(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor, settings: ChunkSettings
) -> LogprobsAndEntropy:
    head = _ChunkedHead(weight_VD, bias_V, settings, hidden_TD, for_gradients=False)
    logprobs_T, entropy_T = _empty_results(hidden_TD, settings)
    for start, stop in settings.spans(len(targets_T)):
        results = head.forward(hidden_TD[start:stop], targets_T[start:stop])
        _store(logprobs_T, entropy_T, *results, start, stop)
        if settings.is_top1_T is not None:
            settings.is_top1_T[start:stop] = head.is_top1()
    return logprobs_T, entropy_T


def _empty_results(hidden_TD: Tensor, settings: ChunkSettings) -> LogprobsAndEntropy:
    logprobs_T = hidden_TD.new_empty(len(hidden_TD), dtype=wide_dtype(hidden_TD.dtype))
    return logprobs_T, torch.empty_like(logprobs_T) if settings.entropy else None


def _store(
    logprobs_T: Tensor, entropy_T: Tensor | None, logprobs_C: Tensor, entropy_C: Tensor | None, start: int, stop: int
) -> None:
    logprobs_T[start:stop] = logprobs_C
    if entropy_T is not None and entropy_C is not None:
        entropy_T[start:stop] = entropy_C


def _dtypes(*inputs: Tensor | None) -> list[torch.dtype | None]:
    return [None if x is None else x.dtype for x in inputs]


def _slice(values_T: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if values_T is None else values_T[start:stop]


def _needs_gradient(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def module_logprobs(head: Head, hidden_TD: Tensor, targets_T: Tensor, settings: ChunkSettings) -> LogprobsAndEntropy:
    """Return the results of `chunked_logprobs` for a head that is any module: LoRA, 4-bit, parametrised, tensor subclasses.

    The module computes each chunk's logits, and non-reentrant checkpointing computes them again in backward. So frozen
    and trained parameters, dropout and hooks inside the module act as in an ordinary forward.
    """
    chunks = [_module_chunk(head, hidden_TD, targets_T, settings, *span) for span in settings.spans(len(targets_T))]
    return _concatenate(chunks)


def module_loss(
    head: Head, hidden_TD: Tensor, targets_T: Tensor, loss: TokenLoss, settings: ChunkSettings
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the results of `fused_loss` for a head that is any module: the summed loss, detached log-probs and entropies."""
    spans = settings.spans(len(targets_T))
    chunks = [_module_chunk(head, hidden_TD, targets_T, settings, *span) for span in spans]
    losses = [loss(*chunk, *span) for chunk, span in zip(chunks, spans, strict=True)]
    logprobs_T, entropy_T = _concatenate([(x.detach(), None if h is None else h.detach()) for x, h in chunks])
    return torch.stack(losses).sum(), logprobs_T, entropy_T


def _concatenate(chunks: list[LogprobsAndEntropy]) -> LogprobsAndEntropy:
    entropies = [entropy_C for _, entropy_C in chunks if entropy_C is not None]
    return torch.cat([logprobs_C for logprobs_C, _ in chunks]), torch.cat(entropies) if entropies else None


def _module_chunk(
    head: Head, hidden_TD: Tensor, targets_T: Tensor, settings: ChunkSettings, start: int, stop: int
) -> LogprobsAndEntropy:
    hidden_CD, targets_C = hidden_TD[start:stop], targets_T[start:stop]
    if not torch.is_grad_enabled():
        return _module_forward(head, hidden_CD, targets_C, settings, start)
    return checkpoint(_module_forward, head, hidden_CD, targets_C, settings, start, use_reentrant=False)


def _module_forward(
    head: Head, hidden_CD: Tensor, targets_C: Tensor, settings: ChunkSettings, start: int
) -> LogprobsAndEntropy:
    logits_CV = head(hidden_CD)
    wide_CV = logits_CV.to(wide_dtype(logits_CV.dtype))
    logprobs_C, entropy_C = logprobs_and_entropy(settings.scale.apply(wide_CV) / settings.temperature, targets_C)
    # Last, because it saves nothing for backward: the recomputation stops before it.
    if settings.is_top1_T is not None:
        settings.is_top1_T[start : start + len(targets_C)] = is_top1(logits_CV.detach(), targets_C)
    if not settings.entropy:
        return logprobs_C, None
    return logprobs_C, entropy_C if settings.entropy_grad else entropy_C.detach()

"""Log-probs and entropies of chosen targets from hidden states and a plain linear head, without [T, V] ever existing.

Naive equivalent of everything here: `definition.naive_logprobs`. `chunked_logprobs` visits the head again in backward
(four head products); `one_visit` forms a per-token loss and all gradients where the logits are (three). Both hold one
chunk's logits. Sums over the vocabulary and over tokens are fp32; sizes are numbers, so nothing waits for the device.

With z = scale(hidden @ weight.T + bias) / temperature, p = softmax(z), H = -sum(p log p) and targets t:

    d logprob / dz_v = [v = t] - p_v          d H / dz_v = -p_v (log p_v + H)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from lowpeak.logprobs import softmax_passes as torch_rows
from lowpeak.logprobs.agreement import cuda_passes
from lowpeak.logprobs.inplace_grad import takes_direct
from lowpeak.logprobs.matmul import HeadGradients, has_wide_product, project, wide_dtype
from lowpeak.logprobs.reference import ChunkSettings
from lowpeak.logprobs.softmax_passes import RowDerivatives

# (logprobs_C, entropy_C or None, start, stop) -> the scalar sum of the losses of tokens [start, stop)
TokenLoss = Callable[[Tensor, Tensor | None, int, int], Tensor]


def chunked_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor, settings: ChunkSettings
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T] and entropies [T] (None unless asked), both differentiable, the entropy where `entropy_grad` says.

    Computed in hidden's dtype (autocast's, where it is on, as a linear layer would be), returned in fp32. With a
    `promised_scale` backward adds the head's gradient to its `.grad`.
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

    With a `promised_scale` the head's gradient is in its `.grad` when this returns, times that scale, and backward
    fails where it is given another (RuntimeError on a CPU; on CUDA an assertion of the device, which ends the process).
    What fails before backward has run leaves it there: whoever catches that zeroes the gradients, as after any step that
    was cut off between two micro-batches.
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
        # The head itself, not what saved-tensor hooks would make of it: its `.grad` may be added to.
        ctx.weight_VD = weight_VD
        ctx.save_for_backward(hidden_TD, bias_V, targets_T)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        logprobs_T, entropy_T = _values(hidden_TD, weight_VD, bias_V, targets_T, settings)
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
        direct = settings.promised_scale is not None and takes_direct(weight_VD)
        with no_autocast(hidden_TD.device):
            sums = HeadGradients(hidden_TD, weight_VD, wanted, direct)
            visit = HeadVisit(weight_VD, bias_V, settings, hidden_TD, for_gradients=True)
            for start, stop in settings.spans(len(targets_T)):
                visit.values(hidden_TD[start:stop], targets_T[start:stop])
                derivatives = grad_logprobs_T[start:stop], _cut(grad_entropy_T, start, stop)
                visit.gradients(*derivatives, sums, slice(start, stop))
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
        scale = settings.promised_scale if takes_direct(weight_VD) else None
        sums = HeadGradients(hidden_TD, weight_VD, ctx.needs_input_grad[:3], direct=scale is not None)
        visit = HeadVisit(weight_VD, bias_V, settings, hidden_TD, for_gradients=True)
        logprobs_T, entropy_T = _empty_values(hidden_TD, settings)
        total = logprobs_T.new_zeros(())
        for start, stop in settings.spans(len(targets_T)):
            values = visit.values(hidden_TD[start:stop], targets_T[start:stop])
            loss_C, derivatives = _loss_derivatives(loss, values, (start, stop), settings, scale)
            visit.gradients(*derivatives, sums, slice(start, stop))
            total += loss_C
            _keep(logprobs_T, entropy_T, *values, start, stop)
            if settings.is_top1_T is not None:
                settings.is_top1_T[start:stop] = visit.is_top1()
        # Kept on ctx, not as saved tensors: they are used next, so nothing should offload them or check their versions.
        ctx.sums, ctx.dtypes, ctx.scale = sums, _dtypes(hidden_TD, weight_VD, bias_V), scale
        if scale is not None:
            sums.settle()
        ctx.mark_non_differentiable(*(x for x in (logprobs_T, entropy_T) if x is not None))
        return total, logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.sums is None:
            raise RuntimeError("the gradients of a one-visit loss were used up by its first backward; visit again")
        sums, ctx.sums = ctx.sums, None
        if ctx.scale is None:
            return *sums.scaled(grad_loss, ctx.dtypes), None, None, None
        kept = (grad_loss - ctx.scale).abs() <= 1e-6 * abs(ctx.scale)
        torch._assert_async(kept, f"a loss whose head gradient was formed to be scaled by {ctx.scale} was not")
        return *sums.scaled(None, ctx.dtypes), None, None, None


class HeadVisit:
    """Visits chunk after chunk: `values`, and then `gradients` of that same chunk, which uses its logits up.

    There is one [C, V] buffer, made once and reused (two where the tensor cores want the gradient in bf16).
    """

    def __init__(
        self, weight_VD: Tensor, bias_V: Tensor | None, settings: ChunkSettings, hidden_TD: Tensor, for_gradients: bool
    ) -> None:
        # For tensor cores the head is cast once per pass; elsewhere a stripe at a time, in the products.
        casts = has_wide_product(hidden_TD)
        self._weight_VD = weight_VD.to(hidden_TD.dtype) if casts else weight_VD
        self._bias_V, self._settings = bias_V, settings
        shape = (min(settings.chunk_size, len(hidden_TD)), weight_VD.shape[0])
        self._logits = hidden_TD.new_empty(shape, dtype=wide_dtype(hidden_TD.dtype))
        self._narrow = hidden_TD.new_empty(shape) if casts and for_gradients else None
        self._passes = passes_for(self._logits)

    def values(self, hidden_CD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies of a chunk, [C] and [C] or None."""
        self._hidden_CD, self._targets_C = hidden_CD, targets_C
        logits_CV = self._logits[: len(hidden_CD)]
        project(logits_CV, hidden_CD, self._weight_VD)
        self._chosen_C = self._passes.chosen_logits(logits_CV, self._bias_V, targets_C, self._settings)
        self._statistics = self._passes.row_statistics(logits_CV, self._bias_V, self._settings)
        self._entropy_C = self._statistics.entropy()
        return self._statistics.logprobs(self._chosen_C), self._entropy_C

    def is_top1(self) -> Tensor:
        """Whether the visited chunk's targets are their rows' greatest logits: bool [C]."""
        return self._statistics.is_top1(self._chosen_C)

    def gradients(self, by_logprobs_C: Tensor, by_entropy_C: Tensor | None, sums: HeadGradients, chunk: slice) -> None:
        """Add the visited chunk's part to `sums`, given the loss's derivative by its log-probs and entropies."""
        logits_CV = self._logits[: len(self._hidden_CD)]
        derivatives = RowDerivatives(by_logprobs_C, by_entropy_C, self._entropy_C)
        narrow_CV = None if self._narrow is None else self._narrow[: len(logits_CV)]
        inputs = (self._bias_V, self._settings, self._targets_C, self._statistics, derivatives)
        grad_CV = self._passes.row_gradient_(logits_CV, *inputs, narrow_CV)
        sums.add(chunk, grad_CV, narrow_CV, self._hidden_CD, self._weight_VD)


def passes_for(logits_CV: Tensor) -> Any:
    """The module of passes over the logits: Triton's on CUDA where they agree with torch's, else torch's."""
    fake = isinstance(logits_CV, FakeTensor)
    return (
        cuda_passes(logits_CV.device)
        if logits_CV.is_cuda and logits_CV.dtype == torch.float32 and not fake
        else torch_rows
    )


def _loss_derivatives(
    loss: TokenLoss,
    values: tuple[Tensor, Tensor | None],
    span: tuple[int, int],
    settings: ChunkSettings,
    scale: float | None,
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """The chunk's loss, and its derivatives times `scale` by each log-prob and, where wanted, each entropy."""
    with torch.enable_grad():
        logprobs_C, entropy_C = values[0].detach().requires_grad_(), values[1]
        if entropy_C is not None:
            entropy_C = entropy_C.detach().requires_grad_(settings.entropy_grad)
        value = loss(logprobs_C, entropy_C, *span)
        leaves = [logprobs_C] + ([entropy_C] if settings.entropy_grad and entropy_C is not None else [])
        if not value.requires_grad:  # a constant: every token of the chunk is masked or clipped away
            return value, (torch.zeros_like(logprobs_C), None)
        found = torch.autograd.grad(value if scale is None else value * scale, leaves, allow_unused=True)
    by_logprobs_C = found[0] if found[0] is not None else torch.zeros_like(logprobs_C)
    return value.detach(), (by_logprobs_C, found[1] if len(found) == 2 else None)


@torch.no_grad()
def _values(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor, settings: ChunkSettings
) -> tuple[Tensor, Tensor | None]:
    visit = HeadVisit(weight_VD, bias_V, settings, hidden_TD, for_gradients=False)
    logprobs_T, entropy_T = _empty_values(hidden_TD, settings)
    for start, stop in settings.spans(len(targets_T)):
        values = visit.values(hidden_TD[start:stop], targets_T[start:stop])
        _keep(logprobs_T, entropy_T, *values, start, stop)
        if settings.is_top1_T is not None:
            settings.is_top1_T[start:stop] = visit.is_top1()
    return logprobs_T, entropy_T


def _empty_values(hidden_TD: Tensor, settings: ChunkSettings) -> tuple[Tensor, Tensor | None]:
    logprobs_T = hidden_TD.new_empty(len(hidden_TD), dtype=wide_dtype(hidden_TD.dtype))
    return logprobs_T, torch.empty_like(logprobs_T) if settings.entropy else None


def _keep(
    first_T: Tensor, second_T: Tensor | None, first_C: Tensor, second_C: Tensor | None, start: int, stop: int
) -> None:
    first_T[start:stop] = first_C
    if second_T is not None and second_C is not None:
        second_T[start:stop] = second_C


def _dtypes(*inputs: Tensor | None) -> list[torch.dtype | None]:
    return [None if x is None else x.dtype for x in inputs]


def _cut(values_T: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if values_T is None else values_T[start:stop]


def _wants_gradient(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)

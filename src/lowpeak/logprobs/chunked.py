"""Log-probs of targets, entropies and divergences from a teacher, chunk by chunk, without logits of shape [T, V].

`reference.naive_logprobs` and `naive_divergence` are the naive equivalents. For a plain linear head, `chunked_logprobs`
recomputes the logits in backward (four head products) and `fused_loss` forms a per-token loss and all gradients along with
them (three). If the head's gradient goes into a gradient sink, which takes complete rows, both recompute the logits by
stripes of the vocabulary (four). A teacher's head adds one product, or two if they are recomputed. For any other head
`module_head.py` recomputes by activation checkpointing. All keep one chunk's logits alive. Sums over the vocabulary and over
tokens are fp32; sizes are Python numbers, so nothing waits for the device.

With z = scale(hidden @ weight.T + bias) / temperature, p = softmax(z), H = -sum(p log p) and targets t:

    d logprob / dz_v = [v = t] - p_v          d H / dz_v = -p_v (log p_v + H)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowpeak.logprobs.divergence import TeacherChunks
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
from lowpeak.logprobs.reference import ChunkSettings
from lowpeak.logprobs.torch_kernels import LossDerivatives, PairStatistics, SoftmaxStatistics

# (logprobs_C, entropy_C or None, start, stop) -> the scalar sum of the losses of tokens [start, stop); with a teacher the
# divergences [C] are a fifth argument.
TokenLoss = Callable[..., Tensor]
# Log-probs [T] and, if asked for, entropies [T] and divergences [T].
HeadValues = tuple[Tensor, Tensor | None, Tensor | None]

_ROWS = 256  # a stripe has a multiple of this many weight rows


def chunked_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor, settings: ChunkSettings
) -> HeadValues:
    """Return log-probs, entropies and divergences, differentiable (the entropies with `entropy_grad` only).

    Computed in hidden's dtype (autocast's inside autocast, as in a linear layer), returned in fp32. With a
    `inplace_grad_scale` backward adds the head's gradient to its sink if it has one, else to its `.grad`.
    """
    hidden_TD, settings = _cast_states(hidden_TD, settings)
    with no_autocast(hidden_TD.device):
        inputs = (hidden_TD, weight_VD, bias_V, targets_T, settings)
        if _needs_gradient(hidden_TD, weight_VD, bias_V):
            return _Recomputed.apply(*inputs)
        with torch.no_grad():
            return _ChunkedHead(*inputs, for_gradients=False).forward_all()


def fused_loss(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    loss: TokenLoss,
    settings: ChunkSettings,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return `sum(loss(chunk))` over chunks, a differentiable scalar, and detached values as of `chunked_logprobs`.

    Gradients of hidden, weight and bias are formed in forward, and backward, which can run once, only scales them.
    `loss` must be a sum over its tokens, differentiable in nothing but its arguments.

    With a `inplace_grad_scale` forward adds the head's gradient, times that scale, to its sink if it has one, else to its
    `.grad`. Backward fails if the loss's gradient is not that scale: RuntimeError on a CPU; on CUDA a device assertion,
    which ends the process. After an error between forward and backward the sum stays changed: zero the gradients, as
    after any step that was aborted between two micro-batches.
    """
    hidden_TD, settings = _cast_states(hidden_TD, settings)
    with no_autocast(hidden_TD.device):
        inputs = (hidden_TD, weight_VD, bias_V, targets_T)
        if _needs_gradient(hidden_TD, weight_VD, bias_V):
            return _FusedLoss.apply(*inputs, loss, settings)
        with torch.no_grad():
            results = _ChunkedHead(*inputs, settings, for_gradients=False).forward_all()
        total = results[0].new_zeros(())
        for start, stop in settings.spans(len(targets_T)):
            total = total + call_loss(loss, _select(results, slice(start, stop)), (start, stop))
        return total, *results


class _Recomputed(torch.autograd.Function):
    """Log-probs, entropies and divergences whose logits are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        settings: ChunkSettings,
    ) -> HeadValues:
        head = _ChunkedHead(hidden_TD, weight_VD, bias_V, targets_T, settings, for_gradients=False)
        logprobs_T, entropy_T, divergence_T = head.forward_all()
        # Not a saved tensor, which saved-tensor hooks may replace: backward may add to this parameter's `.grad`.
        ctx.weight_VD = weight_VD
        softmax, pair = head.statistics()
        ctx.save_for_backward(hidden_TD, bias_V, targets_T, *softmax, *(pair or ()))
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        if entropy_T is not None and not settings.entropy_grad:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T, divergence_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (hidden_TD, bias_V, targets_T, *statistics), weight_VD = ctx.saved_tensors, ctx.weight_VD
        if all(grad_T is None for grad_T in grads):
            return None, None, None, None, None
        by_logprobs_T, *others = grads
        if by_logprobs_T is None:
            by_logprobs_T = torch.zeros_like(statistics[0])
        settings, wanted = ctx.settings, ctx.needs_input_grad[:3]
        inplace = settings.inplace_grad_scale is not None and allows_inplace_grad(weight_VD)
        with no_autocast(hidden_TD.device):
            gradients = HeadGradients(hidden_TD, weight_VD, wanted, inplace)
            head = _ChunkedHead(hidden_TD, weight_VD, bias_V, targets_T, settings, for_gradients=True)
            pair = PairStatistics(*statistics[3:]) if len(statistics) > 3 else None
            derivatives = LossDerivatives(by_logprobs_T, *others)
            head.backward_all(SoftmaxStatistics(*statistics[:3]), pair, derivatives, gradients)
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
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        scale = settings.inplace_grad_scale if allows_inplace_grad(weight_VD) else None
        gradients = HeadGradients(hidden_TD, weight_VD, ctx.needs_input_grad[:3], inplace=scale is not None)
        head = _ChunkedHead(hidden_TD, weight_VD, bias_V, targets_T, settings, for_gradients=True)
        total = hidden_TD.new_zeros((), dtype=wide_dtype(hidden_TD.dtype))
        results, derivatives = [], []
        for span in settings.spans(len(targets_T)):
            results.append(head.forward(slice(*span)))
            loss_C, derivatives_C = _loss_derivatives(loss, results[-1], span, settings, scale)
            total += loss_C
            if gradients.by_stripes:
                derivatives.append(derivatives_C)
            else:
                head.backward(slice(*span), derivatives_C, gradients)
        if gradients.by_stripes:
            head.backward_all(*head.statistics(), LossDerivatives(*concatenate(derivatives)), gradients)
        values = concatenate(results)
        # Not saved tensors: backward uses these next, so nothing should offload them or check their versions.
        ctx.gradients, ctx.dtypes, ctx.scale = gradients, _dtypes(hidden_TD, weight_VD, bias_V), scale
        if scale is not None:
            gradients.store_inplace()
        ctx.mark_non_differentiable(*(x for x in values if x is not None))
        return total, *values

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
    """A linear head run on one chunk of tokens after another, with a gradient by the logits of each.

    All chunks share one buffer of [C, V] numbers (a second for a teacher's, and one in bf16 for gradients in the tensor cores).
    """

    def __init__(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        settings: ChunkSettings,
        for_gradients: bool,
    ) -> None:
        # For tensor cores the head is cast once per pass; elsewhere the products cast it a stripe at a time.
        casts = has_wide_product(hidden_TD)
        self._weight_VD = weight_VD.to(hidden_TD.dtype) if casts else weight_VD
        self._hidden_TD, self._bias_V, self._targets_T, self._settings = hidden_TD, bias_V, targets_T, settings
        size = min(settings.chunk_size, len(hidden_TD)) * len(weight_VD)
        self._logits = hidden_TD.new_empty(size, dtype=wide_dtype(hidden_TD.dtype))
        self._narrow = hidden_TD.new_empty(size) if casts and for_gradients else None
        self._kernels = kernels_for(self._logits)
        self._all_rows = slice(0, len(weight_VD))
        self._statistics: list[SoftmaxStatistics] = []
        self._teacher: TeacherChunks | None = None
        if settings.teacher is not None:
            self._teacher = TeacherChunks(settings.teacher, len(weight_VD), settings, self._logits, self._kernels)

    def forward(self, chunk: slice) -> HeadValues:
        """Return the chunk's log-probs and, if asked for, entropies and divergences, each [C]."""
        logits_CV, targets_C = self._raw_logits(chunk, self._all_rows), self._targets_T[chunk]
        chosen_C = self._kernels.target_logits(logits_CV, self._bias_V, targets_C, self._settings)
        statistics = self._kernels.softmax_statistics(logits_CV, self._bias_V, self._settings)
        self._statistics.append(statistics)
        if self._settings.is_top1_T is not None:
            self._settings.is_top1_T[chunk] = statistics.is_top1(chosen_C)
        divergence_C = None
        if self._teacher is not None:
            self._teacher.load(chunk, self._all_rows)
            divergence_C = self._teacher.forward(logits_CV, self._bias_V, self._settings, statistics)
            if self._settings.teacher_logprobs_T is not None:
                self._settings.teacher_logprobs_T[chunk] = self._teacher.logprobs(targets_C)
        return statistics.logprobs(chosen_C), statistics.entropy(), divergence_C

    def forward_all(self) -> HeadValues:
        """Return all tokens' log-probs and, if asked for, entropies and divergences, each [T]."""
        spans = self._settings.spans(len(self._targets_T))
        logprobs_T, entropy_T, divergence_T = concatenate([self.forward(slice(*span)) for span in spans])
        return logprobs_T, entropy_T, divergence_T

    def statistics(self) -> tuple[SoftmaxStatistics, PairStatistics | None]:
        """Return the statistics of all tokens that ran forward, and those with the teacher, if any."""
        pair = None if self._teacher is None else PairStatistics(*concatenate(self._teacher.statistics))
        return SoftmaxStatistics(*concatenate(self._statistics)), pair

    def backward(self, chunk: slice, derivatives_C: LossDerivatives, gradients: HeadGradients) -> None:
        """Add the part of the chunk that ran forward last, whose logits this consumes, to `gradients`."""
        logits_CV = _view(self._logits, chunk, self._all_rows)
        pair_C = None if self._teacher is None else self._teacher.statistics[-1]
        self._add_part(logits_CV, chunk, self._all_rows, self._statistics[-1], pair_C, derivatives_C, gradients)

    def backward_all(
        self,
        statistics_T: SoftmaxStatistics,
        pair_T: PairStatistics | None,
        derivatives_T: LossDerivatives,
        gradients: HeadGradients,
    ) -> None:
        """Compute all logits again, in chunks or stripes of chunks, and add their parts to `gradients`."""
        num_tokens = len(self._targets_T)
        num_rows = self._stripe_rows() if gradients.by_stripes else len(self._weight_VD)
        for rows in _ranges(len(self._weight_VD), num_rows):
            for chunk in _ranges(num_tokens, self._logits.numel() // num_rows):
                logits_CS = self._raw_logits(chunk, rows)
                if self._teacher is not None:
                    self._teacher.load(chunk, rows)
                parts = (
                    SoftmaxStatistics(*_select(statistics_T, chunk)),
                    None if pair_T is None else PairStatistics(*_select(pair_T, chunk)),
                    LossDerivatives(*_select(derivatives_T, chunk)),
                )
                self._add_part(logits_CS, chunk, rows, *parts, gradients)
            gradients.finish_stripe(rows)

    def _stripe_rows(self) -> int:
        """Return as many weight rows as leave their logits of all tokens, and their gradient, within the buffer's size.

        At least a few hundred: below that, products are slow.
        """
        fitting = self._logits.numel() // max(1, *self._hidden_TD.shape)
        return min(len(self._weight_VD), max(1, fitting // _ROWS) * _ROWS)

    def _raw_logits(self, chunk: slice, rows: slice) -> Tensor:
        """Write logits into the buffer, without bias, scale and cap, and return them."""
        logits_CS = _view(self._logits, chunk, rows)
        project(logits_CS, self._hidden_TD[chunk], self._weight_VD[rows])
        return logits_CS

    def _add_part(
        self,
        logits_CS: Tensor,
        chunk: slice,
        rows: slice,
        statistics_C: SoftmaxStatistics,
        pair_C: PairStatistics | None,
        derivatives_C: LossDerivatives,
        gradients: HeadGradients,
    ) -> None:
        narrow_CS = None if self._narrow is None else _view(self._narrow, chunk, rows)
        bias_S = None if self._bias_V is None else self._bias_V[rows]
        extra_CK, by_divergence_C = None, derivatives_C.by_divergence_C
        if self._teacher is not None and pair_C is not None and by_divergence_C is not None:
            extra_CK = self._teacher.gradient(logits_CS, bias_S, self._settings, pair_C, by_divergence_C)
        inputs = (bias_S, self._settings, self._targets_T[chunk] - rows.start, statistics_C, derivatives_C)
        grad_CS = self._kernels.logits_gradient_(logits_CS, *inputs, narrow_CS, extra_CK)
        gradients.add(chunk, rows, grad_CS, narrow_CS, self._hidden_TD[chunk], self._weight_VD[rows])


def _cast_states(hidden_TD: Tensor, settings: ChunkSettings) -> tuple[Tensor, ChunkSettings]:
    """Return the states that linear heads read, the teacher's too, in autocast's dtype: equal models then diverge by 0."""
    teacher = settings.teacher
    if teacher is not None and isinstance(teacher.head, Tensor):
        settings = replace(settings, teacher=replace(teacher, hidden_TE=cast_for_autocast(teacher.hidden_TE)))
    return cast_for_autocast(hidden_TD), settings


def _ranges(stop: int, step: int) -> list[slice]:
    """Return [0, stop) in slices of `step`; one empty slice if there is nothing."""
    return [slice(start, min(start + step, stop)) for start in range(0, max(stop, 1), max(step, 1))]


def _view(buffer: Tensor, chunk: slice, rows: slice) -> Tensor:
    """Return the first numbers of a buffer as a matrix [C, S]."""
    shape = (chunk.stop - chunk.start, rows.stop - rows.start)
    return buffer[: shape[0] * shape[1]].view(shape)


def _loss_derivatives(
    loss: TokenLoss,
    results: HeadValues,
    span: tuple[int, int],
    settings: ChunkSettings,
    scale: float | None,
) -> tuple[Tensor, LossDerivatives]:
    """Return the chunk's loss, and its derivatives times `scale` by the values; by entropies with `entropy_grad` only."""
    with torch.enable_grad():
        leaves = _leaves(results, (True, settings.entropy_grad, True))
        value = call_loss(loss, leaves, span)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        # A constant loss: every token of the chunk is masked or clipped away.
        if not value.requires_grad:
            derivatives = [torch.zeros_like(leaf) for leaf in wanted]
        else:
            scaled = value if scale is None else value * scale
            derivatives = list(torch.autograd.grad(scaled, wanted, allow_unused=True, materialize_grads=True))
    of_leaf = dict(zip(map(id, wanted), derivatives, strict=True))
    return value.detach(), LossDerivatives(*(of_leaf.get(id(leaf)) for leaf in leaves))  # type: ignore[arg-type]


def _leaves(results: HeadValues, trained: tuple[bool, ...]) -> list[Tensor | None]:
    """Return the values cut off from their graph, each a leaf that needs a gradient if it is trained."""
    pairs = zip(results, trained, strict=True)
    return [None if x is None else x.detach().requires_grad_(needs) for x, needs in pairs]


def call_loss(loss: TokenLoss, values: Sequence[Tensor | None], span: tuple[int, int]) -> Tensor:
    """Return the loss of the tokens in `span`, given their values; divergences are given only if there are any."""
    logprobs_C, entropy_C, divergence_C = values
    return loss(logprobs_C, entropy_C, *span, *([] if divergence_C is None else [divergence_C]))


def concatenate(chunks: Sequence[tuple[Tensor | None, ...]]) -> list[Any]:
    """Return each member of the chunks' tuples for all tokens, None if chunks have none."""
    return [None if members[0] is None else torch.cat(members) for members in zip(*chunks, strict=True)]


def _select(members: tuple[Tensor | None, ...], chunk: slice) -> list[Any]:
    """Return each member for the tokens of a chunk."""
    return [None if x is None else x[chunk] for x in members]


def _dtypes(*inputs: Tensor | None) -> list[torch.dtype | None]:
    return [None if x is None else x.dtype for x in inputs]


def _needs_gradient(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)

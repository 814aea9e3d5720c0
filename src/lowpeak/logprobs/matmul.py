"""Matrix products of heads: logits and gradients accumulated in fp32 at least, and plain linear layers.

fp32 and fp64 operands multiply as they are. bf16 on CUDA uses the tensor cores with fp32 results. All else is widened, a
stripe of the head's weight rows at a time: bf16 on a CPU, whose products would be rounded to bf16, and fp16, whose range
is too small for gradients that no loss scale has multiplied yet.

Shapes: B sequences of L positions, T chosen positions, C tokens of a chunk, S weight rows of a stripe, D hidden,
V vocabulary (or the number of a head's outputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowpeak.device_kind import device_kind
from lowpeak.logprobs.inplace_grad import GradientSink, gradient_sink

_STRIPE = 1 << 22  # numbers
_ONEDNN_BATCH = range(3, 65)  # hidden states for which oneDNN is faster than MKL
_ONEDNN_BYTES = 1 << 26  # size of a head that caches do not hold


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over the vocabulary and over tokens: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def cast_for_autocast(tensor: Tensor) -> Tensor:
    """Return the tensor in autocast's dtype, as autocast casts a linear layer's input; unchanged in fp64 or outside."""
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which operations keep the dtypes of their operands."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def select_positions(hidden_BLD: Tensor, positions_T: Tensor) -> Tensor:
    """Return `hidden.reshape(B * L, D)[positions]`: [T, D].

    The last position of a prompt with several completions is repeated for each of them.
    """
    hidden_ND = hidden_BLD.reshape(-1, hidden_BLD.shape[-1])
    # On CUDA indexing adds up a repeated position's gradients in one order, `index_select` in any. On CPUs both are
    # deterministic, and the second is faster.
    return hidden_ND[positions_T] if hidden_ND.is_cuda else hidden_ND.index_select(0, positions_T)


def fp32_linear(module: Any, hidden: Tensor) -> Tensor:
    """Return a linear head's `hidden @ weight.T + bias` in fp32, also under autocast: [..., D] -> [..., V]."""
    with no_autocast(hidden.device):
        bias = None if module.bias is None else module.bias.float()
        return linear(hidden.float(), module.weight.float(), bias)


def linear(hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return `nn.functional.linear(hidden, weight, bias)`, [..., D] -> [..., V], equal up to fp32 rounding.

    Small fp32 batches without gradients before a large head on a CPU, as in generation, use oneDNN. MKL reads a head
    that exceeds its caches once for every three hidden states or so below 16, oneDNN once for all of them. Milliseconds
    on one thread, for a head of 151,936 x 512:

        hidden states          2      4      8     15     16     32     64
        nn.functional.linear   25     51     81    138    61     74     81
        oneDNN                 31     36     39     48     46     54     80
    """
    if _onednn_is_faster(hidden, weight_VD, bias_V):
        # No public call of torch reaches oneDNN's fp32 product; this operator is private to its compiler.
        return torch.ops.mkldnn._linear_pointwise(hidden, weight_VD, bias_V, "none", [], "")
    return nn.functional.linear(hidden, weight_VD, bias_V)


def wide_linear(hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return `linear(hidden, weight, bias)` with fp32 or fp64 results, [..., D] -> [..., V]; call it under `no_grad`.

    Logits rounded to bf16 have steps of 0.125 at 16 to 32; sampled log-probs would carry that error. Under autocast hidden
    states and weights are rounded to autocast's dtype first, as in a linear layer. Raises RuntimeError as `linear` does for
    two dtypes outside of autocast.
    """
    if hidden.dtype != weight_VD.dtype and not torch.is_autocast_enabled(hidden.device.type):
        return linear(hidden, weight_VD, bias_V)
    hidden = cast_for_autocast(hidden)
    if weight_VD.is_cuda:  # whose wide product takes one dtype; on a CPU `project` rounds the head by stripes
        weight_VD = cast_for_autocast(weight_VD)
    wide = wide_dtype(hidden.dtype)
    if hidden.dtype == weight_VD.dtype == wide:
        return linear(hidden, weight_VD, bias_V)
    out, number = hidden.new_empty(*hidden.shape[:-1], len(weight_VD), dtype=wide), hidden.shape[:-1].numel()
    with no_autocast(hidden.device):
        project(out.view(number, len(weight_VD)), hidden.reshape(number, -1), weight_VD)
    return out if bias_V is None else out.add_(bias_V)


def _is_bias_supported(bias_V: Tensor | None) -> bool:
    # The private operator does not look at a bias's strides and dtype.
    return bias_V is None or (bias_V.is_contiguous() and bias_V.dtype == torch.float32)


def _onednn_is_faster(hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> bool:
    """Return whether torch would compute this product in fp32 with MKL, and oneDNN is available and faster."""
    return (
        weight_VD.device.type == "cpu"
        and weight_VD.dtype == hidden.dtype == torch.float32
        and _is_bias_supported(bias_V)
        and weight_VD.numel() * weight_VD.itemsize >= _ONEDNN_BYTES
        and hidden.numel() // hidden.shape[-1] in _ONEDNN_BATCH
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def project(out_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor) -> None:
    """Write `hidden @ weight.T` into the wide buffer `out`; the head is rounded to hidden's dtype."""
    if weight_VD.dtype == hidden_CD.dtype == out_CV.dtype:
        torch.mm(hidden_CD, weight_VD.T, out=out_CV)
    elif has_wide_product(weight_VD) and hidden_CD.dtype == weight_VD.dtype:
        _wide_product(hidden_CD, weight_VD.T, out_CV.dtype, out_CV)
    else:
        wide_CD = hidden_CD.to(out_CV.dtype)
        for rows, wide_SD in _widened(weight_VD, hidden_CD.dtype, out_CV.dtype):
            torch.mm(wide_CD, wide_SD.T, out=out_CV[:, rows])


class HeadGradients:
    """Running gradients of a head's hidden states, weight and bias; None for each that needs none.

    The weight's and the bias's are wide sums over tokens. With `inplace` the weight's goes into its `.grad`, or if the
    weight has a gradient sink into that. A sink takes complete rows: parts are then added `by_stripes`.
    """

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, wanted: tuple[bool, bool, bool], inplace: bool) -> None:
        wide = wide_dtype(hidden_TD.dtype)
        sink = gradient_sink(weight_VD) if inplace else None
        self.by_stripes = sink is not None
        self.weight: WeightGradient | StripedWeightGradient | None = None
        if wanted[1]:
            self.weight = (
                WeightGradient(weight_VD, wide, inplace) if sink is None else StripedWeightGradient(sink, wide)
            )
        self.bias_V = weight_VD.new_zeros(weight_VD.shape[0], dtype=wide) if wanted[2] else None
        # bf16 rounds a hidden state's gradient once, when it is complete, as any product would. fp16 stays wide: it may
        # be scaled later.
        self._hidden_dtype = torch.bfloat16 if hidden_TD.dtype == torch.bfloat16 else wide
        sum_dtype = wide if self.by_stripes else self._hidden_dtype
        self.hidden_TD = torch.zeros_like(hidden_TD, dtype=sum_dtype) if wanted[0] else None

    def store_inplace(self) -> None:
        """Store the weight's in-place gradient and round the hidden states', so that no wide sum lives until backward."""
        if self.weight is not None:
            self.weight.finish(None)
            self.weight = None
        if self.hidden_TD is not None:
            self.hidden_TD = self.hidden_TD.to(self._hidden_dtype)

    def finish(self, factor: Tensor | None, dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
        """Return the gradients times `factor` in the inputs' dtypes; consumes the sums."""
        by_hidden, by_bias = (
            None if x is None else (x if factor is None else x.mul_(factor)).to(dtype)
            for x, dtype in ((self.hidden_TD, dtypes[0]), (self.bias_V, dtypes[2]))
        )
        return [by_hidden, None if self.weight is None else self.weight.finish(factor), by_bias]

    def add(
        self, chunk: slice, rows: slice, grad_CS: Tensor, narrow_CS: Tensor | None, hidden_CD: Tensor, weight_SD: Tensor
    ) -> None:
        """Add the part of a chunk and of a stripe of weight rows (all, unless `by_stripes`).

        `grad` is the loss's gradient by their logits: wide, and in bf16 for tensor cores (`narrow`).
        """
        if self.bias_V is not None:
            self.bias_V[rows] += grad_CS.sum(0)
        factor_CS = grad_CS if narrow_CS is None else narrow_CS
        if self.hidden_TD is not None:
            target_CD = self.hidden_TD[chunk]
            is_sum = target_CD.dtype == grad_CS.dtype
            sum_CD = target_CD if is_sum else torch.zeros_like(target_CD, dtype=grad_CS.dtype)
            _add_hidden_part(sum_CD, factor_CS, weight_SD, hidden_CD.dtype)
            if not is_sum:
                target_CD.copy_(sum_CD)
        if self.weight is not None:
            self.weight.add(factor_CS, hidden_CD)

    def finish_stripe(self, rows: slice) -> None:
        """Send the weight's gradient by these rows, to which all tokens were added, to its sink, if any."""
        if isinstance(self.weight, StripedWeightGradient):
            self.weight.send(rows.start)


class WeightGradient:
    """The running gradient of a head's weight, in fp32 at least.

    One matrix if the weight has that dtype, else stripes, each rounded and freed in turn. With `inplace` it ends in the
    weight's `.grad`, which is itself the buffer if the dtypes are equal; else `finish` returns it.
    """

    def __init__(self, weight_VD: Tensor, wide: torch.dtype, inplace: bool) -> None:
        self._weight_VD, self._inplace = weight_VD, inplace
        self._single = weight_VD.dtype == wide
        self._fresh = True  # the first chunk is written, not added to zeros
        if self._single and inplace and weight_VD.grad is not None:
            self._sums, self._fresh = [weight_VD.grad], False
        elif self._single:
            self._sums = [torch.empty_like(weight_VD)]
        else:
            self._sums = [torch.empty_like(weight_VD[rows], dtype=wide) for rows in _stripes(weight_VD)]

    def add(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """Add `grad.T @ hidden`."""
        start = 0
        for sum_SD in self._sums:
            _add_weight_part(sum_SD, grad_CV[:, start : start + len(sum_SD)], hidden_CD, self._fresh)
            start += len(sum_SD)
        self._fresh = False

    def finish(self, factor: Tensor | None) -> Tensor | None:
        """Return the gradient times `factor` in the weight's dtype, or None once it is in `.grad`; consumes it."""
        if factor is not None:
            for sum_SD in self._sums:
                sum_SD.mul_(factor)
        sums, self._sums = self._sums, []
        total_VD = sums[0] if self._single else self._rounded(sums)
        if not self._inplace:
            return total_VD
        self._weight_VD.grad = total_VD
        return None

    def _rounded(self, sums: list[Tensor]) -> Tensor:
        """Return the stripes in the weight's dtype, added to an earlier `.grad` if `inplace`; empties the list."""
        before_VD = self._weight_VD.grad if self._inplace else None
        total_VD = torch.empty_like(self._weight_VD) if before_VD is None else before_VD
        stop = len(total_VD)
        while sums:
            # `pop` frees each stripe after it is rounded.
            sum_SD = sums.pop()
            rows = slice(stop - len(sum_SD), stop)
            total_VD[rows] = sum_SD if before_VD is None else sum_SD.add_(before_VD[rows])
            stop = rows.start
        return total_VD


class StripedWeightGradient:
    """The running gradient of a head's weight by one stripe of rows after another, sent to the weight's sink."""

    def __init__(self, sink: GradientSink, wide: torch.dtype) -> None:
        self._sink, self._wide = sink, wide
        self._sum_SD: Tensor | None = None

    def add(self, grad_CS: Tensor, hidden_CD: Tensor) -> None:
        """Add `grad.T @ hidden` to the current stripe."""
        fresh = self._sum_SD is None
        if self._sum_SD is None:
            self._sum_SD = hidden_CD.new_empty(grad_CS.shape[1], hidden_CD.shape[1], dtype=self._wide)
        _add_weight_part(self._sum_SD, grad_CS, hidden_CD, fresh)

    def send(self, start: int) -> None:
        """Add the stripe, whose first row is `start`, to the sink and begin the next."""
        assert self._sum_SD is not None
        self._sink.add_rows(start, self._sum_SD)
        self._sum_SD = None

    def finish(self, factor: Tensor | None) -> None:
        """Return no gradient: all is in the sink."""
        assert factor is None


def _add_weight_part(sum_SD: Tensor, grad_CS: Tensor, hidden_CD: Tensor, fresh: bool) -> None:
    """Add `grad.T @ hidden` to a wide sum, or write it there if that is `fresh`."""
    grad_SC = grad_CS.T
    if grad_CS.dtype == sum_SD.dtype:
        sum_SD.addmm_(grad_SC, hidden_CD.to(grad_CS.dtype), beta=0 if fresh else 1)
        return
    # Not every torch adds bf16 products to a wide sum in one call (addmm); all have mm with a wide result.
    for rows in _stripes(sum_SD):
        product_SD = _wide_product(grad_SC[rows], hidden_CD, sum_SD.dtype)
        sum_SD[rows] = product_SD if fresh else product_SD.add_(sum_SD[rows])


def _add_hidden_part(sum_CD: Tensor, grad_CS: Tensor, weight_SD: Tensor, dtype: torch.dtype) -> None:
    """Add `grad @ weight`, with the weight rounded to `dtype`, to a wide sum."""
    if weight_SD.dtype == dtype == sum_CD.dtype:
        sum_CD.addmm_(grad_CS, weight_SD)
    elif has_wide_product(weight_SD) and grad_CS.dtype == weight_SD.dtype:
        sum_CD += _wide_product(grad_CS, weight_SD, sum_CD.dtype)
    else:
        for rows, wide_SD in _widened(weight_SD, dtype, sum_CD.dtype):
            sum_CD.addmm_(grad_CS[:, rows], wide_SD)


def has_wide_product(matrix: Tensor) -> bool:
    """Return whether products of such a matrix can have fp32 results from bf16 operands."""
    return device_kind(matrix.device) == "cuda" and matrix.dtype == torch.bfloat16


def _wide_product(left: Tensor, right: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return `left @ right` of bf16 operands in a wide dtype, in `out` if given."""
    if isinstance(left, FakeTensor):  # torch has no such product for CPUs, where fake tensors are
        return left.new_empty(len(left), right.shape[1], dtype=dtype) if out is None else out
    return torch.mm(left, right, out_dtype=dtype) if out is None else torch.mm(left, right, out_dtype=dtype, out=out)


def _widened(weight_VD: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield stripes of a [V, D] matrix, rounded to `dtype` and widened; all share one buffer."""
    buffer_SD: Tensor | None = None
    for rows in _stripes(weight_VD):
        if buffer_SD is None:
            buffer_SD = torch.empty_like(weight_VD[rows], dtype=wide)
        stripe_SD = weight_VD[rows].to(dtype)
        yield rows, buffer_SD[: len(stripe_SD)].copy_(stripe_SD)


def _stripes(matrix_VD: Tensor) -> Iterator[slice]:
    """Return the rows of a [V, D] matrix in stripes of 16 MB in fp32, small next to a chunk's logits.

    For fake tensors there is one stripe: each takes the same memory.
    """
    num_rows, width = matrix_VD.shape
    step = max(1, _STRIPE // width)
    end = step if isinstance(matrix_VD, FakeTensor) else num_rows
    return (slice(start, min(start + step, num_rows)) for start in range(0, end, step))

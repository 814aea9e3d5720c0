"""The head's three matrix products, each accumulated in fp32 at least, whatever dtype the operands have.

fp32 and fp64 operands multiply as they are. bf16 on CUDA goes through the tensor cores with fp32 results. Elsewhere
(bf16 on a CPU, whose products would be rounded to bf16; fp16, whose range is too small for gradients that no loss scale
has touched yet) the head is widened a stripe of its rows at a time, never whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_STRIPE = 1 << 22  # numbers


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over the vocabulary and over tokens are kept in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def project(out_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor) -> None:
    """`out = hidden @ weight.T`, written into the wide buffer `out`; the head counts in hidden's dtype."""
    if weight_VD.dtype == hidden_CD.dtype == out_CV.dtype:
        torch.mm(hidden_CD, weight_VD.T, out=out_CV)
    elif has_wide_product(weight_VD) and hidden_CD.dtype == weight_VD.dtype:
        torch.mm(hidden_CD, weight_VD.T, out_dtype=out_CV.dtype, out=out_CV)
    else:
        wide_CD = hidden_CD.to(out_CV.dtype)
        for rows, wide_SD in _widened(weight_VD, hidden_CD.dtype, out_CV.dtype):
            torch.mm(wide_CD, wide_SD.T, out=out_CV[:, rows])


class HeadGradients:
    """Gradients of a head's inputs on their way, None where nothing wants one; weight's and bias's are wide sums."""

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, wanted: tuple[bool, bool, bool], direct: bool) -> None:
        wide = wide_dtype(hidden_TD.dtype)
        # A row of hidden is written once, so bf16 loses what it would in any product; fp16 may yet be scaled.
        row_dtype = torch.bfloat16 if hidden_TD.dtype == torch.bfloat16 else wide
        self.hidden_TD = torch.empty_like(hidden_TD, dtype=row_dtype) if wanted[0] else None
        self.weight = WeightSum(weight_VD, wide, direct) if wanted[1] else None
        self.bias_V = weight_VD.new_zeros(weight_VD.shape[0], dtype=wide) if wanted[2] else None

    def settle(self) -> None:
        """Put a direct sum for the head into its `.grad` now, so that nothing of that size waits for backward."""
        if self.weight is not None:
            self.weight.finish(None)
            self.weight = None

    def scaled(self, factor: Tensor | None, dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
        """The finished gradients in the inputs' dtypes, times `factor`: uses the sums up."""
        by_hidden, by_bias = (
            None if x is None else (x if factor is None else x.mul_(factor)).to(dtype)
            for x, dtype in ((self.hidden_TD, dtypes[0]), (self.bias_V, dtypes[2]))
        )
        return [by_hidden, None if self.weight is None else self.weight.finish(factor), by_bias]

    def add(
        self, chunk: slice, grad_CV: Tensor, narrow_CV: Tensor | None, hidden_CD: Tensor, weight_VD: Tensor
    ) -> None:
        """Take in a chunk: `grad` is the loss's derivative by its logits, wide; `narrow` the same for tensor cores."""
        if self.bias_V is not None:
            self.bias_V.add_(grad_CV.sum(0))
        factor_CV = grad_CV if narrow_CV is None else narrow_CV
        if self.hidden_TD is not None:
            self.hidden_TD[chunk] = _to_hidden(factor_CV, weight_VD, hidden_CD.dtype, grad_CV.dtype)
        if self.weight is not None:
            self.weight.add(factor_CV, hidden_CD)


class WeightSum:
    """The head's gradient on its way, in fp32 at least.

    Whole if that is the head's dtype, else in stripes that are rounded and freed one by one. With `direct` it is added
    to the head's `.grad`, into which a whole one is summed from the start; else `finish` returns it.
    """

    def __init__(self, weight_VD: Tensor, wide: torch.dtype, direct: bool) -> None:
        self._weight_VD, self._direct = weight_VD, direct
        self._whole = weight_VD.dtype == wide
        self._fresh = True  # the first chunk is written, not added to zeros
        if self._whole and direct and weight_VD.grad is not None:
            self._sums, self._fresh = [weight_VD.grad], False
        elif self._whole:
            self._sums = [torch.empty_like(weight_VD)]
        else:
            self._sums = [torch.empty_like(weight_VD[rows], dtype=wide) for rows in _stripes(weight_VD)]

    def add(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """Add `grad.T @ hidden`."""
        wide_CD = hidden_CD.to(grad_CV.dtype)
        beta, self._fresh = 0 if self._fresh else 1, False
        start = 0
        for sum_SD in self._sums:
            grad_SC = grad_CV[:, start : start + len(sum_SD)].T
            start += len(sum_SD)
            if grad_CV.dtype == sum_SD.dtype:
                sum_SD.addmm_(grad_SC, wide_CD, beta=beta)
                continue
            # Not every torch adds bf16 products to a wide sum in one call (addmm); mm with a wide result is in all.
            for rows in _stripes(sum_SD):
                product_SD = torch.mm(grad_SC[rows], hidden_CD, out_dtype=sum_SD.dtype)
                sum_SD[rows] = product_SD if beta == 0 else product_SD.add_(sum_SD[rows])

    def finish(self, factor: Tensor | None) -> Tensor | None:
        """The sum times `factor` in the head's dtype, or None once it is in `.grad`. Uses the sum up."""
        if factor is not None:
            for sum_SD in self._sums:
                sum_SD.mul_(factor)
        sums, self._sums = self._sums, []
        total_VD = sums[0] if self._whole else self._rounded(sums)
        if not self._direct:
            return total_VD
        self._weight_VD.grad = total_VD
        return None

    def _rounded(self, sums: list[Tensor]) -> Tensor:
        """The stripes in the head's dtype, on top of what a direct sum finds in `.grad`; empties the list."""
        before_VD = self._weight_VD.grad if self._direct else None
        total_VD = torch.empty_like(self._weight_VD) if before_VD is None else before_VD
        stop = len(total_VD)
        while sums:  # each stripe is gone once it is rounded
            sum_SD = sums.pop()
            rows = slice(stop - len(sum_SD), stop)
            total_VD[rows] = sum_SD if before_VD is None else sum_SD.add_(before_VD[rows])
            stop = rows.start
        return total_VD


def _to_hidden(grad_CV: Tensor, weight_VD: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    if weight_VD.dtype == dtype == wide:
        return torch.mm(grad_CV, weight_VD)
    if has_wide_product(weight_VD) and grad_CV.dtype == weight_VD.dtype:
        return torch.mm(grad_CV, weight_VD, out_dtype=wide)
    sum_CD = grad_CV.new_zeros(grad_CV.shape[0], weight_VD.shape[1])
    for rows, wide_SD in _widened(weight_VD, dtype, wide):
        sum_CD.addmm_(grad_CV[:, rows], wide_SD)
    return sum_CD


def has_wide_product(matrix: Tensor) -> bool:
    """Whether products of such a matrix can have fp32 results straight from bf16 operands."""
    return matrix.is_cuda and matrix.dtype == torch.bfloat16


def _widened(weight_VD: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Stripes of a [V, D] matrix rounded to `dtype` and then widened, each in the buffer of the one before."""
    buffer_SD: Tensor | None = None
    for rows in _stripes(weight_VD):
        if buffer_SD is None:
            buffer_SD = torch.empty_like(weight_VD[rows], dtype=wide)
        stripe_SD = weight_VD[rows].to(dtype)
        yield rows, buffer_SD[: len(stripe_SD)].copy_(stripe_SD)


def _stripes(matrix_VD: Tensor) -> Iterator[slice]:
    """Rows of a [V, D] matrix in stripes of 16 MB in fp32, which are small beside a chunk's logits."""
    num_rows, width = matrix_VD.shape
    step = max(1, _STRIPE // width)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

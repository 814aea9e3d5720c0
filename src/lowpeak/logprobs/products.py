"""The head's three matrix products, each accumulated in fp32 at least, whatever dtype the operands have.

fp32 and fp64 operands multiply as they are. bf16 on CUDA goes through the tensor cores with fp32 results. Elsewhere
(bf16 on a CPU, whose products would be rounded to bf16; fp16, whose range is too small for gradients that no loss scale
has touched yet) the head is widened a stripe of its rows at a time, never whole. A CPU with bf16 units multiplies the
widened values in them: what was bf16 loses nothing, the logits' gradients round as on CUDA, and the results are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over the vocabulary and over tokens are kept in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def project(out_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor) -> None:
    """`out = hidden @ weight.T`, written into the wide buffer `out`."""
    if weight_VD.dtype == out_CV.dtype:
        torch.mm(hidden_CD, weight_VD.T, out=out_CV)
    elif _has_wide_product(weight_VD):
        torch.mm(hidden_CD, weight_VD.T, out_dtype=out_CV.dtype, out=out_CV)
    else:
        wide_CD = hidden_CD.to(out_CV.dtype)
        with _bf16_units(weight_VD):
            for rows, wide_SD in _widened(weight_VD, out_CV.dtype):
                torch.mm(wide_CD, wide_SD.T, out=out_CV[:, rows])


@dataclass(frozen=True)
class HeadGradients:
    """Gradients of a head's inputs on their way, None where nothing wants one; weight's and bias's are wide sums.

    The weight's is whole if that is what it will be given as, else in stripes that are rounded and freed one by one.
    """

    hidden_TD: Tensor | None
    weight_SD: list[Tensor] | None
    bias_V: Tensor | None

    @classmethod
    def zeros(cls, hidden_TD: Tensor, weight_VD: Tensor, wanted: tuple[bool, bool, bool]) -> HeadGradients:
        """Empty sums for those of hidden, weight and bias that are `wanted`."""
        wide = wide_dtype(hidden_TD.dtype)
        # A row of hidden is written once, so bf16 loses what it would in any product; fp16 may yet be scaled.
        row_dtype = torch.bfloat16 if hidden_TD.dtype == torch.bfloat16 else wide
        return cls(
            torch.empty_like(hidden_TD, dtype=row_dtype) if wanted[0] else None,
            _empty_sums(weight_VD, wide) if wanted[1] else None,
            weight_VD.new_zeros(weight_VD.shape[0], dtype=wide) if wanted[2] else None,
        )

    def scaled(self, factor: Tensor | None, dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
        """The finished gradients in the inputs' dtypes, times `factor`: uses the sums up."""
        by_hidden, by_bias = (
            None if x is None else (x if factor is None else x.mul_(factor)).to(dtype)
            for x, dtype in ((self.hidden_TD, dtypes[0]), (self.bias_V, dtypes[2]))
        )
        by_weight = None if self.weight_SD is None else _joined(self.weight_SD, factor, dtypes[1])
        return [by_hidden, by_weight, by_bias]

    def add(self, rows: slice, grad_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor) -> None:
        """Take in the chunk at `rows`: `grad` is the loss's derivative by that chunk's logits, wide."""
        if self.bias_V is not None:
            self.bias_V.add_(grad_CV.sum(0))
        narrow_CV = grad_CV.to(weight_VD.dtype) if _has_wide_product(weight_VD) else grad_CV
        if self.hidden_TD is not None:
            self.hidden_TD[rows] = _to_hidden(narrow_CV, weight_VD, grad_CV.dtype)
        if self.weight_SD is not None:
            with _bf16_units(hidden_CD):
                _to_weight(self.weight_SD, narrow_CV, hidden_CD)


def _to_hidden(grad_CV: Tensor, weight_VD: Tensor, wide: torch.dtype) -> Tensor:
    if weight_VD.dtype == wide:
        return torch.mm(grad_CV, weight_VD)
    if _has_wide_product(weight_VD):
        return torch.mm(grad_CV, weight_VD, out_dtype=wide)
    sum_CD = grad_CV.new_zeros(grad_CV.shape[0], weight_VD.shape[1])
    with _bf16_units(weight_VD):
        for rows, wide_SD in _widened(weight_VD, wide):
            sum_CD.addmm_(grad_CV[:, rows], wide_SD)
    return sum_CD


def _to_weight(sums_SD: list[Tensor], grad_CV: Tensor, hidden_CD: Tensor) -> None:
    wide_CD = hidden_CD.to(grad_CV.dtype)
    start = 0
    for sum_SD in sums_SD:
        grad_SC = grad_CV[:, start : start + len(sum_SD)].T
        start += len(sum_SD)
        if grad_CV.dtype == sum_SD.dtype:
            sum_SD.addmm_(grad_SC, wide_CD)
            continue
        # Not every torch adds bf16 products to a wide sum in one call (addmm); mm with a wide result is in all of them.
        for rows in _stripes(sum_SD):
            sum_SD[rows] += torch.mm(grad_SC[rows], hidden_CD, out_dtype=sum_SD.dtype)


def _empty_sums(weight_VD: Tensor, wide: torch.dtype) -> list[Tensor]:
    if weight_VD.dtype == wide:
        return [torch.zeros_like(weight_VD)]
    return [torch.zeros_like(weight_VD[rows], dtype=wide) for rows in _stripes(weight_VD)]


def _joined(sums_SD: list[Tensor], factor: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """The sums times `factor` as one matrix. Empties the list, so that a stripe is gone once it is rounded."""
    if factor is not None:
        for sum_SD in sums_SD:
            sum_SD.mul_(factor)
    if len(sums_SD) == 1:
        return sums_SD.pop().to(dtype)
    by_weight_VD = sums_SD[0].new_empty(sum(map(len, sums_SD)), sums_SD[0].shape[1], dtype=dtype)
    stop = len(by_weight_VD)
    while sums_SD:
        sum_SD = sums_SD.pop()
        by_weight_VD[stop - len(sum_SD) : stop] = sum_SD
        stop -= len(sum_SD)
    return by_weight_VD


def _has_wide_product(weight_VD: Tensor) -> bool:
    return weight_VD.is_cuda and weight_VD.dtype == torch.bfloat16


@contextmanager
def _bf16_units(matrix: Tensor) -> Iterator[None]:
    """Products of fp32 matrices in a CPU's bf16 units while the context is open, if `matrix` is bf16 on such a CPU."""
    if matrix.dtype != torch.bfloat16 or matrix.device.type != "cpu" or not _cpu_has_bf16_units():
        yield
        return
    # The setting is the process's, so it is held for these products alone.
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _cpu_has_bf16_units() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _widened(weight_VD: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Stripes of a [V, D] matrix in another dtype, each in the buffer of the one before."""
    buffer_SD: Tensor | None = None
    for rows in _stripes(weight_VD):
        if buffer_SD is None:
            buffer_SD = torch.empty_like(weight_VD[rows], dtype=wide)
        stripe_SD = weight_VD[rows]
        yield rows, buffer_SD[: len(stripe_SD)].copy_(stripe_SD)


def _stripes(matrix_VD: Tensor) -> Iterator[slice]:
    """Rows of a [V, D] matrix in stripes of 16 MB in fp32, which are small beside a chunk's logits."""
    num_rows, width = matrix_VD.shape
    step = max(1, (1 << 22) // width)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

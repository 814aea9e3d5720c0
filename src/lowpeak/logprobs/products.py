"""The head's three matrix products, each accumulated in fp32 at least, whatever dtype the operands have.

fp32 and fp64 operands multiply as they are. bf16 on CUDA goes through the tensor cores with fp32 results. Elsewhere
(bf16 on a CPU, whose products would be rounded to bf16; fp16, whose range is too small for gradients that no loss scale
has touched yet) the head is widened a stripe of its rows at a time, never whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
        for rows in _stripes(weight_VD, out_CV.numel()):
            torch.mm(wide_CD, weight_VD[rows].to(out_CV.dtype).T, out=out_CV[:, rows])


@dataclass(frozen=True)
class HeadGradients:
    """Gradients of a head's inputs on their way, None where nothing wants one; weight's and bias's are wide sums."""

    hidden_TD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None

    @classmethod
    def zeros(cls, hidden_TD: Tensor, weight_VD: Tensor, wanted: tuple[bool, bool, bool]) -> HeadGradients:
        """Empty sums for those of hidden, weight and bias that are `wanted`."""
        wide = wide_dtype(hidden_TD.dtype)
        # A row of hidden is written once, so bf16 loses what it would in any product; fp16 may yet be scaled.
        row_dtype = torch.bfloat16 if hidden_TD.dtype == torch.bfloat16 else wide
        return cls(
            torch.empty_like(hidden_TD, dtype=row_dtype) if wanted[0] else None,
            torch.zeros_like(weight_VD, dtype=wide) if wanted[1] else None,
            weight_VD.new_zeros(weight_VD.shape[0], dtype=wide) if wanted[2] else None,
        )

    def scaled(self, factor: Tensor | None, dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
        """The finished gradients in the inputs' dtypes, times `factor`: uses the sums up."""
        sums = (self.hidden_TD, self.weight_VD, self.bias_V)
        if factor is not None:
            sums = tuple(None if x is None else x.mul_(factor) for x in sums)  # type: ignore[assignment]
        return [None if x is None else x.to(dtype) for x, dtype in zip(sums, dtypes, strict=True)]

    def add(self, rows: slice, grad_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor) -> None:
        """Take in the chunk at `rows`: `grad` is the loss's derivative by that chunk's logits, wide."""
        if self.bias_V is not None:
            self.bias_V.add_(grad_CV.sum(0))
        narrow_CV = grad_CV.to(weight_VD.dtype) if _has_wide_product(weight_VD) else grad_CV
        if self.hidden_TD is not None:
            self.hidden_TD[rows] = _to_hidden(narrow_CV, weight_VD, grad_CV.dtype)
        if self.weight_VD is not None:
            _to_weight(self.weight_VD, narrow_CV, hidden_CD)


def _to_hidden(grad_CV: Tensor, weight_VD: Tensor, wide: torch.dtype) -> Tensor:
    if weight_VD.dtype == wide:
        return torch.mm(grad_CV, weight_VD)
    if _has_wide_product(weight_VD):
        return torch.mm(grad_CV, weight_VD, out_dtype=wide)
    sum_CD = grad_CV.new_zeros(grad_CV.shape[0], weight_VD.shape[1])
    for rows in _stripes(weight_VD, grad_CV.numel()):
        sum_CD.addmm_(grad_CV[:, rows], weight_VD[rows].to(wide))
    return sum_CD


def _to_weight(sum_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    if grad_CV.dtype == sum_VD.dtype:
        sum_VD.addmm_(grad_CV.T, hidden_CD.to(sum_VD.dtype))
        return
    # Not every torch adds bf16 products to a wide sum in one call (addmm); mm with a wide result is in all of them.
    for rows in _stripes(sum_VD, grad_CV.numel()):
        sum_VD[rows] += torch.mm(grad_CV[:, rows].T, hidden_CD, out_dtype=sum_VD.dtype)


def _has_wide_product(weight_VD: Tensor) -> bool:
    return weight_VD.is_cuda and weight_VD.dtype == torch.bfloat16


def _stripes(matrix_VD: Tensor, num_logits: int) -> Iterator[slice]:
    """Rows of a [V, D] matrix in stripes that are small beside a chunk's logits, or of 16 MB in fp32."""
    num_rows, width = matrix_VD.shape
    step = max(1, max(num_logits // 4, 1 << 22) // width)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

"""The passes of `torch_kernels.py` over a chunk's raw logits as Triton kernels, one program per token.

`softmax_statistics` reads [C, V] once; `logits_gradient_` reads and writes it once, and can also write bf16 for products
in the tensor cores. Imported on CUDA only, where torch installs Triton (or with TRITON_INTERPRET=1, without a GPU).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowpeak.logprobs.reference import ChunkSettings
from lowpeak.logprobs.torch_kernels import LossDerivatives, SoftmaxStatistics

_BLOCK = 4096  # ids at a time
_NUM_WARPS = 8


def target_logits(raw_CV: Tensor, bias_V: Tensor | None, targets_C: Tensor, settings: ChunkSettings) -> Tensor:
    """Return the final logits of the targets: [C]."""
    # Computed as in `softmax_statistics`, to the bit: `is_top1` compares them with its maximum.
    chosen_C = raw_CV.new_empty(len(raw_CV))
    if len(raw_CV):
        with torch.cuda.device_of(raw_CV):
            _chosen[(len(raw_CV),)](
                raw_CV,
                raw_CV if bias_V is None else bias_V,
                targets_C.contiguous(),
                chosen_C,
                raw_CV.stride(0),
                **_finish_arguments(bias_V, settings),
            )
    return chosen_C


def softmax_statistics(raw_CV: Tensor, bias_V: Tensor | None, settings: ChunkSettings) -> SoftmaxStatistics:
    """Return each token's sums over the vocabulary; reads `raw` once and leaves it unchanged."""
    num_tokens, num_ids = raw_CV.shape
    max_C, sum_C, dot_C = (raw_CV.new_empty(num_tokens) for _ in range(3))
    if num_tokens:
        with torch.cuda.device_of(raw_CV):
            _statistics[(num_tokens,)](
                raw_CV,
                raw_CV if bias_V is None else bias_V,
                max_C,
                sum_C,
                dot_C,
                raw_CV.stride(0),
                num_ids,
                **_finish_arguments(bias_V, settings),
                WITH_DOT=settings.entropy,
                BLOCK=_BLOCK,
                num_warps=_NUM_WARPS,
            )
    return SoftmaxStatistics(max_C, sum_C, dot_C if settings.entropy else None)


def logits_gradient_(
    raw_CV: Tensor,
    bias_V: Tensor | None,
    settings: ChunkSettings,
    targets_C: Tensor,
    statistics: SoftmaxStatistics,
    derivatives: LossDerivatives,
    narrow_CV: Tensor | None = None,
) -> Tensor:
    """Overwrite raw logits with the loss's gradient by them and return it; copy it into `narrow` if given.

    The logits may be a range of the vocabulary's, as in `torch_kernels`.
    """
    num_tokens, num_ids = raw_CV.shape
    a_C, b_C, k_C = derivatives.coefficients(statistics, settings.gain)
    if num_tokens:
        with torch.cuda.device_of(raw_CV):
            _gradient[(num_tokens,)](
                raw_CV,
                raw_CV if bias_V is None else bias_V,
                raw_CV if narrow_CV is None else narrow_CV,
                targets_C.contiguous(),
                statistics.max_C,
                a_C.contiguous(),
                b_C.contiguous(),
                b_C if k_C is None else k_C.contiguous(),
                raw_CV.stride(0),
                0 if narrow_CV is None else narrow_CV.stride(0),
                num_ids,
                **_finish_arguments(bias_V, settings),
                WITH_ENTROPY=k_C is not None,
                WITH_NARROW=narrow_CV is not None,
                BLOCK=_BLOCK,
                num_warps=_NUM_WARPS,
            )
    return raw_CV


def _finish_arguments(bias_V: Tensor | None, settings: ChunkSettings) -> dict[str, Any]:
    """Return the arguments of z = outer * tanh(inner * (x + bias)) with a cap, else z = inner * (x + bias)."""
    cap = settings.scale.softcap
    inner = settings.gain if cap is None else settings.scale.logit_scale / cap
    outer = 1.0 if cap is None else cap / settings.temperature
    return {"inner": inner, "outer": outer, "WITH_BIAS": bias_V is not None, "WITH_CAP": cap is not None}


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    # Every version of Triton has exp. Its argument is at most 0, so it cannot overflow.
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def _load(
    raw: tl.tensor,
    bias: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    inner: tl.tensor,
    WITH_BIAS: tl.constexpr,
    WITH_CAP: tl.constexpr,
) -> tl.tensor:
    """Return inner * (x + bias), or its tanh; x and bias are 0 where `inside` is False."""
    x = tl.load(raw + columns, mask=inside, other=0.0)
    if WITH_BIAS:
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    x *= inner
    if WITH_CAP:
        x = _tanh(x)
    return x


@triton.jit
def _chosen(
    raw: tl.tensor,
    bias: tl.tensor,
    targets: tl.tensor,
    chosen_out: tl.tensor,
    stride: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    WITH_BIAS: tl.constexpr,
    WITH_CAP: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    target = tl.load(targets + row)
    raw += row.to(tl.int64) * stride
    tl.store(chosen_out + row, _load(raw, bias, target, target >= 0, inner, WITH_BIAS, WITH_CAP) * outer)


@triton.jit
def _statistics(
    raw: tl.tensor,
    bias: tl.tensor,
    max_out: tl.tensor,
    sum_out: tl.tensor,
    dot_out: tl.tensor,
    stride: tl.tensor,
    num_ids: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    WITH_BIAS: tl.constexpr,
    WITH_CAP: tl.constexpr,
    WITH_DOT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    raw += row.to(tl.int64) * stride
    # Each lane has a running maximum, to which its sums are relative; lanes are combined once, at the end.
    top = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_ids, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_ids
        z = _load(raw, bias, columns, inside, inner, WITH_BIAS, WITH_CAP) * outer
        z = tl.where(inside, z, float("-inf"))
        new_top = tl.maximum(top, z)
        moved = top - new_top
        kept = tl.exp(moved)
        here = tl.exp(z - new_top)
        if WITH_DOT:
            dot = kept * (dot + moved * total) + tl.where(inside, here * (z - new_top), 0.0)
        total = kept * total + here
        top = new_top
    greatest = tl.max(top, 0)
    moved = top - greatest
    kept = tl.exp(moved)
    tl.store(max_out + row, greatest)
    tl.store(sum_out + row, tl.sum(kept * total, 0))
    if WITH_DOT:
        tl.store(dot_out + row, tl.sum(kept * (dot + moved * total), 0))


@triton.jit
def _gradient(
    raw: tl.tensor,
    bias: tl.tensor,
    narrow: tl.tensor,
    targets: tl.tensor,
    max_in: tl.tensor,
    a_in: tl.tensor,
    b_in: tl.tensor,
    k_in: tl.tensor,
    stride: tl.tensor,
    narrow_stride: tl.tensor,
    num_ids: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    WITH_BIAS: tl.constexpr,
    WITH_CAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    raw += row.to(tl.int64) * stride
    narrow += row.to(tl.int64) * narrow_stride
    target = tl.load(targets + row)
    greatest = tl.load(max_in + row)
    a = tl.load(a_in + row)
    b = tl.load(b_in + row)
    k = tl.load(k_in + row)
    for start in range(0, num_ids, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_ids
        level = _load(raw, bias, columns, inside, inner, WITH_BIAS, WITH_CAP)
        shifted = level * outer - greatest
        factor = b + k * shifted if WITH_ENTROPY else b
        grad = tl.exp(shifted) * factor + tl.where(columns == target, a, 0.0)
        if WITH_CAP:
            grad *= 1.0 - level * level
        tl.store(raw + columns, grad, mask=inside)
        if WITH_NARROW:
            tl.store(narrow + columns, grad.to(tl.bfloat16), mask=inside)

"""One step of CompactAdamW on a tensor as a Triton kernel: weights, low bits and states are read and written once.

A program takes some blocks of the states. It computes what `CompactAdamW` computes in torch, without fp32 copies in memory. bf16
tensors are passed as int16, so that their bits are read as they are. Imported on CUDA only, where torch installs Triton (or with
TRITON_INTERPRET=1, without a GPU).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowpeak.optim.formats import LARGEST_GRADIENT, TensorStep, largest_weight, noise_keys

_TILE = 1024  # values of a program
_NUM_WARPS = 4
_FP32_WEIGHTS = -1  # in the place of the number of low bits


def update(step: TensorStep) -> None:
    """Update weights, low bits and states of a tensor in place."""
    tensor, state = step.tensor, step.tensor.state
    size, block = tensor.weights.numel(), tensor.block or _TILE
    if not size:
        return
    width = triton.next_power_of_2(block)
    rows = max(1, _TILE // width)
    key1, key2 = noise_keys(tensor.noise_key)
    weights = _bits(tensor.weights)
    low_bits = _FP32_WEIGHTS if tensor.weights.dtype == torch.float32 else tensor.weight_bits - 16
    with torch.cuda.device_of(weights):
        _update[(triton.cdiv(triton.cdiv(size, block), rows),)](
            weights,
            state.get("low_bits", weights),
            state["exp_avg"],
            state.get("exp_avg_scale", weights),
            state["exp_avg_sq"],
            state.get("exp_avg_sq_scale", weights),
            _bits(step.gradients),
            size,
            block,
            tensor.start,
            key1,
            key2,
            step.decay,
            1 - step.beta1,
            step.beta2,
            1 - step.beta2,
            step.rate,
            step.root,
            step.eps,
            LARGEST_GRADIENT,
            largest_weight(tensor.weight_bits),
            LOW_BITS=low_bits,
            BF16_GRADIENTS=step.gradients.dtype == torch.bfloat16,
            BLOCKS=tensor.block is not None,
            ROWS=rows,
            WIDTH=width,
            num_warps=_NUM_WARPS,
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round(x: tl.tensor) -> tl.tensor:
    # To the nearest integer, ties to even, for |x| < 2**22: the sum has no bits below 1.
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _clamp(x: tl.tensor, largest: tl.tensor) -> tl.tensor:
    # Comparisons with a NaN are false, so that it stays; maximum and minimum may drop it.
    return tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))


@triton.jit
def _as_fp32(bits: tl.tensor) -> tl.tensor:
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["start", "key1", "key2"])
def _update(
    weights: tl.tensor, low: tl.tensor, first: tl.tensor, first_scale: tl.tensor, second: tl.tensor,
    second_scale: tl.tensor, gradients: tl.tensor,
    size: tl.tensor, block: tl.tensor, start: tl.tensor, key1: tl.tensor, key2: tl.tensor,
    decay: tl.tensor, rest1: tl.tensor, beta2: tl.tensor, rest2: tl.tensor, rate: tl.tensor, root: tl.tensor, eps: tl.tensor,
    largest_gradient: tl.tensor, largest: tl.tensor,
    LOW_BITS: tl.constexpr, BF16_GRADIENTS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)[None, :]
    at = rows[:, None] * block + columns
    inside = (columns < block) & (at < size)
    has_row = rows * block < size

    g = tl.load(gradients + at, inside, 0)
    if BF16_GRADIENTS:
        g = _as_fp32(g)
    g = _clamp(g, largest_gradient)
    m = tl.load(first + at, inside, 0).to(tl.float32)
    v = tl.load(second + at, inside, 0).to(tl.float32)
    if BLOCKS:
        m = tl.div_rn(m, 127.0)
        m = tl.div_rn(m, 2 - tl.abs(m)) * tl.load(first_scale + rows, has_row, 0)[:, None]
        v = tl.div_rn(v, 255.0) * tl.load(second_scale + rows, has_row, 0)[:, None]
        v = v * v
    w = tl.load(weights + at, inside, 0)
    if LOW_BITS >= 0:
        bits = w.to(tl.int32) << 16
        if LOW_BITS > 0:
            bits += tl.load(low + at, inside, 0).to(tl.int32) << (16 - LOW_BITS)
        w = bits.to(tl.float32, bitcast=True)

    m += rest1 * (g - m)
    v = v * beta2 + rest2 * g * g
    w = w * decay - rate * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)

    if BLOCKS:
        scale = tl.max(tl.abs(m), 1)
        y = tl.div_rn(m, tl.where(scale > 0, scale, 1.0)[:, None])
        codes = _round(tl.div_rn(y * 254, tl.abs(y) + 1))
        tl.store(first + at, codes.to(tl.int8), inside)
        tl.store(first_scale + rows, scale, has_row)
        v = tl.sqrt_rn(v)
        scale = tl.max(v, 1)
        codes = _round(tl.div_rn(v, tl.where(scale > 0, scale, 1.0)[:, None]) * 255)
        codes = tl.where((v > 0) & (codes < 1), 1.0, codes)
        tl.store(second + at, codes.to(tl.int32).to(tl.uint8), inside)
        tl.store(second_scale + rows, scale, has_row)
    else:
        tl.store(first + at, m, inside)
        tl.store(second + at, v, inside)
    if LOW_BITS < 0:
        tl.store(weights + at, w, inside)
    else:
        _store_split(weights, low, w, at, inside, start, key1, key2, largest, LOW_BITS)


@triton.jit(do_not_specialize=["start", "key1", "key2"])
def _store_split(
    weights: tl.tensor, low: tl.tensor, w: tl.tensor, at: tl.tensor, inside: tl.tensor,
    start: tl.tensor, key1: tl.tensor, key2: tl.tensor, largest: tl.tensor, LOW_BITS: tl.constexpr,
) -> None:  # fmt: skip
    """Store bf16 weights and their low bits, rounded stochastically to 16 + LOW_BITS bits; see `split_weights`."""
    w = tl.where(tl.abs(w) < float("inf"), _clamp(w, largest), float("nan"))
    bits = w.to(tl.int32, bitcast=True)
    if LOW_BITS < 16:
        noise = (at + start).to(tl.uint32)
        noise = _mix(noise ^ key1.to(tl.uint32, bitcast=True))
        noise = _mix(noise ^ key2.to(tl.uint32, bitcast=True))
        dropped: tl.constexpr = 16 - LOW_BITS
        bits = (bits + (noise & ((1 << dropped) - 1)).to(tl.int32)) & -(1 << dropped)
    top = (bits + 0x8000) >> 16
    tl.store(weights + at, top.to(tl.int16), inside)
    rest = (bits - (top << 16)) >> (16 - LOW_BITS)
    if LOW_BITS == 16:
        tl.store(low + at, rest.to(tl.int16), inside)
    if LOW_BITS == 8:
        tl.store(low + at, rest.to(tl.int8), inside)

"""Formats of weights and optimizer states in few bits, as pure functions of tensors, and the step that kernels compute on them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WeightBits = Literal[16, 24, 32]
# Two fp32 buffers that are overwritten, in place of new ones: fresh memory costs more than the arithmetic in it.
Spares = tuple[Tensor | None, Tensor | None]
NO_SPARES: Spares = (None, None)


def split_weights(
    values: Tensor, weight_bits: WeightBits, noise: Tensor | None = None, spare: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Split fp32 values into bf16 weights and the low bits beside them: int16, int8 (24 bits) or None (16 bits).

    top = round(values to bf16); low = bits(values) - bits(top). `noise` (int32, from 0 to 2**dropped - 1) rounds stochastically:
    E[join_weights(*split_weights(values, ...))] = values.
    """
    bits = values.view(torch.int32)
    dropped = 32 - weight_bits
    if dropped:
        assert noise is not None, "fewer than 32 bits are rounded stochastically"
        bits = (bits + noise).bitwise_and_(-(1 << dropped))
    top = torch.add(bits, 0x8000, out=buffer(values, spare).view(torch.int32)).bitwise_right_shift_(16)
    weights = top.to(torch.int16).view(torch.bfloat16)
    if weight_bits == 16:
        return weights, None
    # A conversion to a narrower integer keeps the lowest bits, and top << 16 has none of them.
    return weights, bits.to(torch.int16) if weight_bits == 32 else (bits >> 8).to(torch.int8)


def join_weights(weights: Tensor, low: Tensor | None, out: Tensor | None = None, spare: Tensor | None = None) -> Tensor:
    """Return the fp32 values of weights and their low bits; the inverse of `split_weights`.

    Here and below, `out` is an fp32 buffer for the result and `spare` one that is overwritten; if None, a new one is used.
    """
    values = buffer(weights, out).copy_(weights)
    if low is not None:
        # The bits of bf16 are the first half of fp32's, and integer sums wrap as the difference did.
        wide_low = buffer(low, spare).view(torch.int32).copy_(low)
        values.view(torch.int32).add_(wide_low, alpha=256 if low.dtype == torch.int8 else 1)
    return values


def buffer(like: Tensor, given: Tensor | None) -> Tensor:
    """Return `given`, or a new fp32 tensor of the shape of `like`."""
    return torch.empty_like(like, dtype=torch.float32) if given is None else given


def encode_first_moment(values: Tensor, block: int, spares: Spares = NO_SPARES) -> tuple[Tensor, Tensor]:
    """Return int8 codes = round(127 * 2y / (1 + |y|)) with y = values / scale; scales are the blocks' largest magnitudes."""
    codes, rest = (buffer(values, spare) for spare in spares)
    scales = torch.abs(values, out=rest).view(-1, block).amax(dim=1)
    torch.div(values.view(-1, block), _divisor(scales), out=codes.view(-1, block))
    torch.abs(codes, out=rest).add_(1)
    return codes.mul_(254).div_(rest).round_().to(torch.int8), scales


def decode_first_moment(
    codes: Tensor, scales: Tensor, block: int, out: Tensor | None = None, spare: Tensor | None = None
) -> Tensor:
    """Return scale * c / (2 - |c|) with c = codes / 127; the inverse of `encode_first_moment` up to rounding."""
    ratios = buffer(codes, out).copy_(codes).div_(127)
    ratios.div_(torch.abs(ratios, out=buffer(codes, spare)).neg_().add_(2))
    ratios.view(-1, block).mul_(scales[:, None])
    return ratios


def encode_second_moment(values: Tensor, block: int, spares: Spares = NO_SPARES) -> tuple[Tensor, Tensor]:
    """Return uint8 codes = round(255 * sqrt(values) / scale); scales are the blocks' largest roots."""
    roots = torch.sqrt(values, out=buffer(values, spares[0])).view(-1, block)
    scales = roots.amax(dim=1)
    return roots.div_(_divisor(scales)).mul_(255).round_().to(torch.uint8).view(-1), scales


def decode_second_moment(
    codes: Tensor, scales: Tensor, block: int, out: Tensor | None = None, spare: Tensor | None = None
) -> Tensor:
    """Return (scale * codes / 255) ** 2; the inverse of `encode_second_moment` up to rounding."""
    roots = buffer(codes, out).copy_(codes).div_(255)
    roots.view(-1, block).mul_(scales[:, None])
    return roots.square_()


ENCODERS = {"exp_avg": encode_first_moment, "exp_avg_sq": encode_second_moment}
DECODERS = {"exp_avg": decode_first_moment, "exp_avg_sq": decode_second_moment}


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1)[:, None]


def rounding_noise(
    key: str, start: int, stop: int, bits: int, device: torch.device, spares: Spares = NO_SPARES
) -> Tensor:
    """Return random int32 numbers from 0 to 2**bits - 1 for the values [start, stop) of a tensor.

    They depend on the key and on each value's position alone: all ranks and a resumed run draw the same. With `spares` they are
    in the first one.
    """
    numbers, shifted = (
        torch.empty(stop - start, dtype=torch.int32, device=device) if spare is None else spare.view(torch.int32)
        for spare in spares
    )
    # Positions wrap at 2**32, as int32 sums do.
    torch.arange(stop - start, out=numbers).add_((start + (1 << 31)) % (1 << 32) - (1 << 31))
    for number in noise_keys(key):
        _mix(numbers.bitwise_xor_(number), shifted)
    return numbers.bitwise_and_((1 << bits) - 1)


def noise_keys(key: str) -> tuple[int, int]:
    """Return two int32 numbers by which a key chooses its noise."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


def _mix(x: Tensor, shifted: Tensor) -> None:
    """Apply the 32-bit integer hash "lowbias32" (C. Wellons, 2018) in place; `shifted` is overwritten."""
    # int32 products wrap, and a mask makes a shift logical.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted).bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(shifted)
        if factor != 1:
            x.mul_(factor)


@dataclass(frozen=True)
class TensorStep:
    """A step of one tensor, for kernels: its flat weights and gradients, its state, and the step's numbers.

    `block` is that of the states, None for fp32 states; `start` the position of the first weight in the whole tensor.
    weights = decay * weights - rate * exp_avg / (sqrt(exp_avg_sq) / root + eps)
    """

    weights: Tensor
    gradients: Tensor
    state: Mapping[str, Tensor]
    block: int | None
    weight_bits: WeightBits
    noise_key: str
    start: int
    decay: float
    beta1: float
    beta2: float
    rate: float
    root: float
    eps: float

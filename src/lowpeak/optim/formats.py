"""Formats of weights and optimizer states in few bits, and AdamW's step in torch operations."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

WeightBits = Literal[16, 24, 32]

_SCALE = "_scale"  # after a moment's key: the scales of its codes
_CHUNK = 1 << 18  # values that are decoded at a time: temporaries of about 8 MB
# The largest weight: the largest bf16 number with the largest low bits. Above it, nearest bf16 numbers are infinite.
_LARGEST_BITS = 0x7F7F7FFF
# The largest gradient: its square is finite in fp32.
LARGEST_GRADIENT = 1.8e19


def split_weights(values: Tensor, weight_bits: WeightBits, noise: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Split fp32 values into bf16 weights and the low bits beside them: int16, int8 (24 bits) or None (16 bits).

    top = round(values to bf16); low = bits(values) - bits(top). `noise` (int32, from 0 to 2**dropped - 1) rounds stochastically:
    E[join_weights(*split_weights(values, ...))] = values. Finite values stay finite: those beyond `largest_weight` are set to
    it. Infinities become NaN.
    """
    largest = largest_weight(weight_bits)
    # Adding to the bits of a NaN could carry into the sign, and give zero; those of this constant have room.
    finite = values.nan_to_num(nan=math.nan, posinf=math.nan, neginf=math.nan).clamp_(-largest, largest)
    bits = finite.view(torch.int32)
    dropped = 32 - weight_bits
    if dropped:
        assert noise is not None, "fewer than 32 bits are rounded stochastically"
        bits = (bits + noise).bitwise_and_(-(1 << dropped))
    top = (bits + 0x8000).bitwise_right_shift_(16)
    weights = top.to(torch.int16).view(torch.bfloat16)
    if weight_bits == 16:
        return weights, None
    # A conversion to a narrower integer keeps the lowest bits, and top << 16 has none of them.
    return weights, bits.to(torch.int16) if weight_bits == 32 else (bits >> 8).to(torch.int8)


def largest_weight(weight_bits: WeightBits) -> float:
    """Return the largest weight of a format: 3.396e38 (0x7F7F7FFF in fp32) without the bits that the format drops."""
    largest: float = struct.unpack("<f", struct.pack("<I", _LARGEST_BITS & -(1 << (32 - weight_bits))))[0]
    return largest


def join_weights(weights: Tensor, low: Tensor | None) -> Tensor:
    """Return the fp32 values of bf16 weights and their low bits; the inverse of `split_weights`."""
    values = weights.float()
    if low is not None:
        # The bits of bf16 are the first half of fp32's, and integer sums wrap as the difference did.
        values.view(torch.int32).add_(low.to(torch.int32), alpha=256 if low.dtype == torch.int8 else 1)
    return values


def encode_first_moment(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return int8 codes = round(127 * 2y / (1 + |y|)) with y = values / scale; scales are the blocks' largest magnitudes."""
    blocks = values.view(-1, block)
    scales = blocks.abs().amax(dim=1)
    ratios = blocks / _divisor(scales)
    codes = ratios.mul(254).div_(ratios.abs_().add_(1)).round_()
    return codes.to(torch.int8).view(-1), scales


def decode_first_moment(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return scale * c / (2 - |c|) with c = codes / 127; the inverse of `encode_first_moment` up to rounding."""
    ratios = codes.view(-1, block).float().div_(127)
    return ratios.div_(ratios.abs().neg_().add_(2)).mul_(scales[:, None]).view(-1)


def encode_second_moment(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return uint8 codes = round(255 * sqrt(values) / scale); scales are the blocks' largest roots.

    The code of a positive value is at least 1: a divisor that is rounded to zero would let a step divide by eps alone.
    """
    roots = values.view(-1, block).sqrt()
    scales, smallest = roots.amax(dim=1), (roots > 0).float()
    codes = roots.div_(_divisor(scales)).mul_(255).round_().maximum(smallest)
    return codes.to(torch.uint8).view(-1), scales


def decode_second_moment(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return (scale * codes / 255) ** 2; the inverse of `encode_second_moment` up to rounding."""
    return codes.view(-1, block).float().div_(255).mul_(scales[:, None]).square_().view(-1)


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1)[:, None]


def rounding_noise(key: str, start: int, stop: int, bits: int, device: torch.device) -> Tensor:
    """Return random int32 numbers from 0 to 2**bits - 1 for the values [start, stop) of a tensor.

    They depend on the key and on each value's position alone: all ranks and a resumed run draw the same.
    """
    numbers = torch.arange(start, stop, device=device).to(torch.int32)
    for number in noise_keys(key):
        _mix(numbers.bitwise_xor_(number))
    return numbers.bitwise_and_((1 << bits) - 1)


def noise_keys(key: str) -> tuple[int, int]:
    """Return two int32 numbers by which a key chooses its noise."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


def _mix(x: Tensor) -> None:
    """Apply the 32-bit integer hash "lowbias32" (C. Wellons, 2018) in place."""
    # int32 products wrap, and a mask makes a shift logical.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)


_ENCODERS = {"exp_avg": encode_first_moment, "exp_avg_sq": encode_second_moment}
_DECODERS = {"exp_avg": decode_first_moment, "exp_avg_sq": decode_second_moment}


@dataclass(frozen=True)
class CompactTensor:
    """A flat tensor of weights with its low bits and optimizer states, read and written as fp32 values.

    `state` has low_bits, and exp_avg and exp_avg_sq in fp32 or as codes with `_scale`; it may be on another device than the
    weights. `block` is the number of values of one scale, None for fp32 states. `start` is the position of the first value in
    the unsharded tensor; `noise_key` and positions decide the noise of stochastic rounding.
    """

    weights: Tensor
    state: Mapping[str, Tensor]
    block: int | None
    weight_bits: WeightBits
    noise_key: str
    start: int = 0

    def slice(self, first: int, last: int) -> CompactTensor:
        """Return values [first, last) as views; both are multiples of the block, or the end."""
        block = self.block or 1
        state = {
            key: value[first // block : -(-last // block)] if key.endswith(_SCALE) else value[first:last]
            for key, value in self.state.items()
        }
        return replace(self, weights=self.weights[first:last], state=state, start=self.start + first)

    def chunks(self, size: int) -> Iterator[tuple[int, int]]:
        """Return ranges of at most `size` values, of whole blocks, that cover the tensor."""
        total, step = self.weights.numel(), size // (self.block or 1) * (self.block or 1)
        return ((first, min(first + step, total)) for first in range(0, total, step))

    def read(self, key: str, first: int = 0, last: int | None = None) -> Tensor:
        """Return a copy of values [first, last) in fp32, on the state's device; `key` is "weight" or a moment's."""
        last = self.weights.numel() if last is None else last
        if key == "weight":
            return self._read_weights(first, last)
        if self.block is None:
            return self.state[key][first:last].clone()
        begin = first // self.block * self.block
        whole = self.slice(begin, min(-(-last // self.block) * self.block, self.weights.numel()))
        return _DECODERS[key](whole.state[key], whole.state[key + _SCALE], self.block)[first - begin : last - begin]

    def _read_weights(self, first: int, last: int) -> Tensor:
        weights, low = self.weights[first:last], self.state.get("low_bits")
        if low is not None:
            return join_weights(weights.to(low.device), low[first:last])
        return weights.clone() if weights.dtype == torch.float32 else weights.float()

    def write(self, key: str, values: Tensor) -> None:
        """Store fp32 values of the whole tensor; `key` as for `read`."""
        if key == "weight":
            self._write_weights(values)
        elif self.block is None:
            self.state[key].copy_(values)
        else:
            codes, scales = _ENCODERS[key](values, self.block)
            self.state[key].copy_(codes)
            self.state[key + _SCALE].copy_(scales)

    def _write_weights(self, values: Tensor) -> None:
        if self.weights.dtype == torch.float32:
            self.weights.copy_(values)
            return
        noise = None
        if self.weight_bits < 32:
            stop = self.start + values.numel()
            noise = rounding_noise(self.noise_key, self.start, stop, 32 - self.weight_bits, values.device)
        weights, low = split_weights(values, self.weight_bits, noise)
        self.weights.copy_(weights)
        if low is not None:
            self.state["low_bits"].copy_(low)


@dataclass(frozen=True)
class TensorStep:
    """A step of one tensor: its values, its gradients, and the step's numbers.

    weights = decay * weights - rate * exp_avg / (sqrt(exp_avg_sq) / root + eps)
    """

    tensor: CompactTensor
    gradients: Tensor
    decay: float
    beta1: float
    beta2: float
    rate: float
    root: float
    eps: float

    def slice(self, first: int, last: int) -> TensorStep:
        """Return the step of values [first, last) as views; see CompactTensor.slice."""
        return replace(self, tensor=self.tensor.slice(first, last), gradients=self.gradients[first:last])


def update(step: TensorStep) -> None:
    """Update weights, low bits and states of a tensor in place, by torch's operations: the definition of the kernel."""
    for first, last in step.tensor.chunks(_CHUNK):
        _update_chunk(step.slice(first, last))
        if isinstance(step.gradients, FakeTensor):  # each chunk takes the same memory
            return


def _update_chunk(step: TensorStep) -> None:
    tensor = step.tensor
    gradient = step.gradients.to(torch.float32, copy=True).clamp_(-LARGEST_GRADIENT, LARGEST_GRADIENT)
    first, second, values = (tensor.read(key) for key in ("exp_avg", "exp_avg_sq", "weight"))
    first.lerp_(gradient, 1 - step.beta1)
    second.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
    divisors = second.sqrt().div_(step.root).add_(step.eps)
    values.mul_(step.decay).sub_((first / divisors).mul_(step.rate))
    for key, new in (("exp_avg", first), ("exp_avg_sq", second), ("weight", values)):
        tensor.write(key, new)

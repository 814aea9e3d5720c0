"""AdamW on bf16 weights that learns like fp32: low bits beside the weights, optimizer states in 8 bits.

The model runs on bf16 weights. Nearest rounding would lose most updates at the learning rates of RL: next to 0.02 the next bf16
number is 1.2e-4 away. So the optimizer keeps the bits that bf16 drops:

| weight_bits | beside the bf16 weight | an update is |
| --- | --- | --- |
| 32 | int16 | exact: both together are the fp32 weight |
| 24 | int8 | rounded stochastically to 24 bits |
| 16 | nothing | rounded stochastically to bf16: unbiased, with noise |

States of 8 bits are an int8 of the first moment, companded by softsign, and a uint8 of the second moment's square root, in blocks
of one row with an fp32 scale each. Vectors and tensors below 4,096 values keep fp32 states. A block never spans two rows, so shards
of rows have the same blocks on any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

WeightBits = Literal[16, 24, 32]
MOMENTS = ("exp_avg", "exp_avg_sq")
_BLOCK = 128
_SMALLEST_BLOCK = 32  # below it scales would take more than an eighth of the codes' bytes
_SMALLEST_TENSOR = 4096
_CHUNK = 1 << 20  # values that are decoded at a time: temporaries of about 30 MB


def split_weights(values: Tensor, weight_bits: WeightBits, noise: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Split fp32 values into bf16 weights and the low bits beside them: int16, int8 (24 bits) or None (16 bits).

    top = round(values to bf16); low = bits(values) - bits(top). `noise` (int32, from 0 to 2**dropped - 1) rounds stochastically:
    E[join_weights(*split_weights(values, ...))] = values.
    """
    bits = values.view(torch.int32)
    dropped = 32 - weight_bits
    if dropped:
        assert noise is not None, "fewer than 32 bits are rounded stochastically"
        bits = (bits + noise) & -(1 << dropped)
    top = (bits + 0x8000) >> 16
    weights = top.to(torch.int16).view(torch.bfloat16)
    if weight_bits == 16:
        return weights, None
    low = bits - (top << 16)
    return weights, low.to(torch.int16) if weight_bits == 32 else (low >> 8).to(torch.int8)


def join_weights(weights: Tensor, low: Tensor | None) -> Tensor:
    """Return the fp32 values of bf16 weights and their low bits; the inverse of `split_weights`."""
    if low is None:
        return weights.float()
    bits = weights.view(torch.int16).to(torch.int32) << 16
    bits += low.to(torch.int32) << (8 if low.dtype == torch.int8 else 0)
    return bits.view(torch.float32)


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
    return ratios.div_(2 - ratios.abs()).mul_(scales[:, None]).view(-1)


def encode_second_moment(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return uint8 codes = round(255 * sqrt(values) / scale); scales are the blocks' largest roots."""
    roots = values.view(-1, block).sqrt()
    scales = roots.amax(dim=1)
    return roots.div_(_divisor(scales)).mul_(255).round_().to(torch.uint8).view(-1), scales


def decode_second_moment(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return (scale * codes / 255) ** 2; the inverse of `encode_second_moment` up to rounding."""
    return codes.view(-1, block).float().div_(255).mul_(scales[:, None]).square_().view(-1)


_ENCODERS = {"exp_avg": encode_first_moment, "exp_avg_sq": encode_second_moment}
_DECODERS = {"exp_avg": decode_first_moment, "exp_avg_sq": decode_second_moment}


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1)[:, None]


def rounding_noise(key: str, start: int, stop: int, bits: int, device: torch.device) -> Tensor:
    """Return random int32 numbers from 0 to 2**bits - 1 for the values [start, stop) of a tensor.

    They depend on the key and on each value's position alone: all ranks and a resumed run draw the same.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    numbers = torch.arange(start, stop, device=device).to(torch.int32)
    for part in (digest[:4], digest[4:]):
        numbers = _mix(numbers ^ int.from_bytes(part, "little", signed=True))
    return numbers & ((1 << bits) - 1)


def _mix(x: Tensor) -> Tensor:
    # The 32-bit integer hash "lowbias32" (C. Wellons, 2018); int32 products wrap, and a mask makes a shift logical.
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


class CompactAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on bf16 weights with low bits and 8-bit states.

    With `weight_bits=32` and `state_bits=32` a step is that of torch.optim.AdamW on the fp32 weights. fp32 parameters, such as
    LoRA's, have no low bits. `names` of the parameters, set by `name_parameters`, and `seed` decide the noise of 24 and 16 bits.
    States: step, low_bits, and exp_avg and exp_avg_sq in fp32 or as codes with `_scale`, all flat and of this rank's shard.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        weight_bits: WeightBits | None = 32,
        state_bits: Literal[8, 32] = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.weight_bits: WeightBits = weight_bits or 32
        self.state_bits, self.seed = state_bits, seed
        self.names: dict[nn.Parameter, str] = {}
        self.starts: dict[nn.Parameter, int] = {}

    def name_parameters(self, named: Mapping[str, nn.Parameter], starts: Mapping[str, int]) -> None:
        """Set the parameters' names, and the positions of this rank's first values in them: noise is derived from both."""
        self.names = {parameter: name for name, parameter in named.items()}
        self.starts = {parameter: starts[name] for name, parameter in named.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, in chunks of 2**20 values."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        state = self._state(parameter)
        state["step"] += 1
        step, (beta1, beta2) = state["step"].double(), group["betas"]
        rate, root = group["lr"] / (1 - beta1**step), (1 - beta2**step).sqrt()
        gradient = _flat(parameter.grad)
        for start, stop in self._chunks(parameter):
            gradients = gradient[start:stop].float()
            first, second = (self.read(parameter, key, start, stop) for key in MOMENTS)
            weights = self.read(parameter, "weight", start, stop)
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            first.lerp_(gradients, 1 - beta1)
            second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
            divisors = second.sqrt().div_(root).add_(group["eps"])
            weights.sub_((first / divisors).mul_(rate))
            self.write(parameter, {"exp_avg": first, "exp_avg_sq": second, "weight": weights}, start)

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return a parameter's state, of zeros before its first step."""
        state = self.state[parameter]
        if state:
            return state
        weights = _flat(parameter)
        size, block = weights.numel(), self._block(parameter)
        state["step"] = torch.tensor(0.0)
        if weights.dtype == torch.bfloat16 and self.weight_bits > 16:
            state["low_bits"] = weights.new_zeros(size, dtype=torch.int16 if self.weight_bits == 32 else torch.int8)
        for key, dtype in zip(MOMENTS, (torch.int8, torch.uint8), strict=True):
            state[key] = weights.new_zeros(size, dtype=dtype if block else torch.float32)
            if block:
                state[f"{key}_scale"] = weights.new_zeros(size // block, dtype=torch.float32)
        return state

    def _block(self, parameter: nn.Parameter) -> int | None:
        """Return the values of a block, the largest divisor of a row up to 128; None for fp32 states."""
        if self.state_bits == 32 or parameter.dim() < 2 or parameter.numel() < _SMALLEST_TENSOR:
            return None
        row = _local(parameter).shape[1:].numel()
        return next((size for size in range(_BLOCK, _SMALLEST_BLOCK - 1, -1) if row % size == 0), None)

    def _chunks(self, parameter: nn.Parameter) -> Iterator[tuple[int, int]]:
        size, block = _local(parameter).numel(), self._block(parameter) or 1
        chunk = _CHUNK // block * block
        return ((start, min(start + chunk, size)) for start in range(0, size, chunk))

    def read(self, parameter: nn.Parameter, key: str, start: int, stop: int) -> Tensor:
        """Return a copy of values [start, stop) of this rank's shard in fp32; `key` is "weight" or one of MOMENTS."""
        state = self._state(parameter)
        if key == "weight":
            weights, low = _flat(parameter)[start:stop], state.get("low_bits")
            return (
                weights.clone()
                if weights.dtype == torch.float32
                else join_weights(weights, None if low is None else low[start:stop])
            )
        block = self._block(parameter)
        if block is None:
            return state[key][start:stop].clone()
        first, last = start // block, -(-stop // block)
        codes, scales = state[key][first * block : last * block], state[f"{key}_scale"][first:last]
        return _DECODERS[key](codes, scales, block)[start - first * block : stop - first * block]

    def write(
        self, parameter: nn.Parameter, values: Mapping[str, Tensor], start: int = 0, step: Tensor | None = None
    ) -> None:
        """Store fp32 values of this rank's shard from `start` on, under the keys of `read`; blocks must be whole.

        `step` sets the number of the parameter's steps.
        """
        state, block = self._state(parameter), self._block(parameter)
        if step is not None:
            state["step"].copy_(step)
        for key, real in values.items():
            stop = start + real.numel()
            if key == "weight":
                self._write_weights(parameter, real, start)
            elif block is None:
                state[key][start:stop] = real
            else:
                codes, scales = _ENCODERS[key](real, block)
                state[key][start:stop] = codes
                state[f"{key}_scale"][start // block : stop // block] = scales

    def _write_weights(self, parameter: nn.Parameter, values: Tensor, start: int) -> None:
        state, weights, stop = self.state[parameter], _flat(parameter), start + values.numel()
        if weights.dtype == torch.float32:
            weights[start:stop] = values
            return
        noise = None
        if self.weight_bits < 32:
            key = f"{self.seed}/{int(state['step'])}/{self.names.get(parameter, '')}"
            first = self.starts.get(parameter, 0) + start
            noise = rounding_noise(key, first, first + values.numel(), 32 - self.weight_bits, values.device)
        weights[start:stop], low = split_weights(values, self.weight_bits, noise)
        if low is not None:
            state["low_bits"][start:stop] = low

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the states of a CompactAdamW with the same formats, or the fp32 states of an AdamW."""
        # torch would convert codes to the parameters' dtype.
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter, state = parameters[index], self._state(parameters[index])
            if all(saved[key].dtype == torch.float32 for key in MOMENTS) and "low_bits" not in saved:
                moments = {key: _flat(saved[key]).to(parameter.device) for key in MOMENTS}
                self.write(parameter, moments, step=torch.as_tensor(saved["step"]))
            else:
                if _formats(saved) != _formats(state):
                    raise ValueError(f"the states of parameter {index} have another format or size")
                for key, value in saved.items():
                    state[key].copy_(value)


def _formats(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {key: (value.dtype, value.shape) for key, value in state.items()}


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _flat(tensor: Any) -> Tensor:
    return _local(tensor).detach().view(-1)


def find_compact(optimizer: Any) -> CompactAdamW | None:
    """Return the CompactAdamW in an optimizer or in accelerate's wrapper around it; None for other optimizers."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, CompactAdamW) else None


def clear_low_bits(optimizer: Any) -> None:
    """Set the low bits of an optimizer that has some to 0, after something else has written the weights."""
    compact = find_compact(optimizer)
    for state in () if compact is None else compact.state.values():
        if "low_bits" in state:
            state["low_bits"].zero_()


def compact_optimizer(args: Any, storage: Any) -> tuple[type[CompactAdamW], dict[str, Any]]:
    """Return the class and the arguments of the optimizer for transformers' arguments and a StorageFormat."""
    return CompactAdamW, {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_bits": storage.weight_bits,
        "state_bits": storage.state_bits,
        "seed": args.seed,
    }


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients to a global norm of at most `max_norm`; return the norm before, summed in fp32 also for bf16 gradients."""
    gradients: list[Any] = [each.grad for each in parameters if each.grad is not None]
    norms: dict[Any, list[Any]] = {}  # by mesh: parameters of one model may be sharded over several
    for gradient in gradients:
        norms.setdefault(getattr(gradient, "device_mesh", None), []).append(
            torch.linalg.vector_norm(gradient, dtype=torch.float32)
        )
    of_meshes: list[Any] = [torch.linalg.vector_norm(torch.stack(each)) for each in norms.values()]
    norm = torch.linalg.vector_norm(
        torch.stack([each.full_tensor() if hasattr(each, "full_tensor") else each for each in of_meshes])
    )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    for gradient in gradients:
        _local(gradient).mul_(scale)
    return norm

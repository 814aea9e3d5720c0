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

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowpeak.errors import first_line
from lowpeak.optim.formats import (
    DECODERS,
    ENCODERS,
    NO_SPARES,
    Spares,
    TensorStep,
    WeightBits,
    buffer,
    join_weights,
    rounding_noise,
    split_weights,
)

logger = logging.getLogger(__name__)

# Weight bits, state bits and columns with which a kernel is compared with torch's operations.
_CHECKED: tuple[tuple[WeightBits | None, Literal[8, 32], int], ...] = (
    (32, 8, 200),
    (24, 32, 200),
    (16, 8, 128),
    (None, 8, 96),
)

MOMENTS = ("exp_avg", "exp_avg_sq")
_BLOCK = 128
_SMALLEST_BLOCK = 32  # below it scales would take more than an eighth of the codes' bytes
_SMALLEST_TENSOR = 4096
_ALLOWED = 1e-3  # codes of 8 bits may differ by one where a value is halfway between two
_NORM_PIECE = 1 << 22
_CHUNK = 1 << 18  # values that are decoded at a time: temporaries of about 8 MB


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
        """Update every parameter that has a gradient, in chunks of 2**18 values."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update_tensor(parameter, group, step_kernel(_local(parameter)))
        return loss

    def update_tensor(
        self, parameter: nn.Parameter, group: Mapping[str, Any], kernel: Callable[[TensorStep], None] | None
    ) -> None:
        """Update one parameter by a kernel, or by torch's operations."""
        state = self._state(parameter)
        state["step"] += 1
        weights, gradients = _flat(parameter), _flat(parameter.grad)
        if kernel is not None:
            kernel(self._tensor_step(parameter, weights, gradients, group))
            return
        step, (beta1, beta2) = state["step"].double(), group["betas"]
        rate, root = group["lr"] / (1 - beta1**step), (1 - beta2**step).sqrt()
        chunks = list(self._chunks(parameter))
        buffers = weights.new_empty(5, chunks[0][1] if chunks else 0, dtype=torch.float32)
        for start, stop in chunks:
            first, second, values, chunk, spare = buffers[:, : stop - start].unbind()
            self.read(parameter, "exp_avg", start, stop, first, spare)
            self.read(parameter, "exp_avg_sq", start, stop, second, spare)
            self.read(parameter, "weight", start, stop, values, spare).mul_(1 - group["lr"] * group["weight_decay"])
            chunk.copy_(gradients[start:stop])
            first.lerp_(chunk, 1 - beta1)
            second.mul_(beta2).addcmul_(chunk, chunk, value=1 - beta2)
            divisors = torch.sqrt(second, out=spare).div_(root).add_(group["eps"])
            values.sub_(torch.div(first, divisors, out=chunk).mul_(rate))
            written = {"exp_avg": first, "exp_avg_sq": second, "weight": values}
            self.write(parameter, written, start, spares=(chunk, spare))

    def _tensor_step(
        self, parameter: nn.Parameter, weights: Tensor, gradients: Tensor, group: Mapping[str, Any]
    ) -> TensorStep:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        number = int(state["step"])
        return TensorStep(
            weights,
            gradients,
            state,
            self._block(parameter),
            self.weight_bits,
            self._noise_key(parameter),
            self.starts.get(parameter, 0),
            decay=1 - group["lr"] * group["weight_decay"],
            beta1=beta1,
            beta2=beta2,
            rate=group["lr"] / (1 - beta1**number),
            root=math.sqrt(1 - beta2**number),
            eps=group["eps"],
        )

    def _noise_key(self, parameter: nn.Parameter) -> str:
        return f"{self.seed}/{int(self.state[parameter]['step'])}/{self.names.get(parameter, '')}"

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

    def read(
        self,
        parameter: nn.Parameter,
        key: str,
        start: int,
        stop: int,
        out: Tensor | None = None,
        spare: Tensor | None = None,
    ) -> Tensor:
        """Return a copy of values [start, stop) of this rank's shard in fp32; `key` is "weight" or one of MOMENTS.

        `out` is a buffer for whole blocks, and `spare` one that is overwritten; if None, new ones are used.
        """
        state = self._state(parameter)
        if key == "weight":
            weights, low = _flat(parameter)[start:stop], state.get("low_bits")
            return join_weights(weights, None if low is None else low[start:stop], out, spare)
        block = self._block(parameter)
        if block is None:
            return buffer(state[key][start:stop], out).copy_(state[key][start:stop])
        first, last = start // block, -(-stop // block)
        codes, scales = state[key][first * block : last * block], state[f"{key}_scale"][first:last]
        return DECODERS[key](codes, scales, block, out, spare)[start - first * block : stop - first * block]

    def write(
        self,
        parameter: nn.Parameter,
        values: Mapping[str, Tensor],
        start: int = 0,
        step: Tensor | None = None,
        spares: Spares = NO_SPARES,
    ) -> None:
        """Store fp32 values of this rank's shard from `start` on, under the keys of `read`; blocks must be whole.

        `step` sets the number of the parameter's steps. `spares` are buffers that are overwritten.
        """
        state, block = self._state(parameter), self._block(parameter)
        if step is not None:
            state["step"].copy_(step)
        for key, real in values.items():
            stop = start + real.numel()
            if key == "weight":
                self._write_weights(parameter, real, start, spares)
            elif block is None:
                state[key][start:stop] = real
            else:
                codes, scales = ENCODERS[key](real, block, spares)
                state[key][start:stop] = codes
                state[f"{key}_scale"][start // block : stop // block] = scales

    def _write_weights(self, parameter: nn.Parameter, values: Tensor, start: int, spares: Spares) -> None:
        state, weights, stop = self.state[parameter], _flat(parameter), start + values.numel()
        if weights.dtype == torch.float32:
            weights[start:stop] = values
            return
        noise = None
        if self.weight_bits < 32:
            first = self.starts.get(parameter, 0) + start
            key, dropped = self._noise_key(parameter), 32 - self.weight_bits
            noise = rounding_noise(key, first, first + values.numel(), dropped, values.device, spares)
        weights[start:stop], low = split_weights(values, self.weight_bits, noise, spares[1])
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


def step_kernel(weights: Tensor) -> Callable[[TensorStep], None] | None:
    """Return the Triton kernel for weights on CUDA if it agrees with torch's operations there; None otherwise."""
    if not weights.is_cuda or isinstance(weights, FakeTensor):
        return None
    return _cuda_kernel(weights.device)


@cache
def _cuda_kernel(device: torch.device) -> Callable[[TensorStep], None] | None:
    if find_spec("triton") is None:
        return None
    try:
        from lowpeak.optim.triton_step import update

        difference = kernel_difference(update, device)
    # A compiler or a driver may raise anything.
    except Exception as error:
        logger.warning("The optimizer steps without a Triton kernel: %s: %s.", type(error).__name__, first_line(error))
        return None
    if difference <= _ALLOWED:
        return update
    logger.warning(
        "The optimizer steps without a Triton kernel: it differs from torch's operations by %.2g.", difference
    )
    return None


def kernel_difference(kernel: Callable[[TensorStep], None], device: torch.device) -> float:
    """Return how far a kernel's updates are from torch's after two steps in each format, over the updates' norm."""
    worst = 0.0
    for bits, state_bits, columns in _CHECKED:
        found = []
        for by_kernel in (True, False):
            generator = torch.Generator().manual_seed(0)
            values, gradient = (torch.randn(70, columns, generator=generator) for _ in range(2))
            dtype = torch.float32 if bits is None else torch.bfloat16
            weight = nn.Parameter(values.to(device, dtype))
            optimizer = CompactAdamW([weight], lr=1e-2, weight_bits=bits, state_bits=state_bits)
            start = weight.detach().float().view(-1)
            for _ in range(2):
                weight.grad = gradient.to(device, dtype)
                optimizer.update_tensor(weight, optimizer.param_groups[0], kernel if by_kernel else None)
            read = [optimizer.read(weight, key, 0, weight.numel()) for key in ("weight", *MOMENTS)]
            found.append([read[0] - start, *read[1:]])
        worst = max(worst, *(float((one - other).norm() / other.norm()) for one, other in zip(*found, strict=True)))
    return worst


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
        mesh = getattr(gradient, "device_mesh", None)
        # On a CPU the norm of a bf16 tensor takes an fp32 copy of it: of one piece at a time here.
        pieces = gradient.flatten().split(_NORM_PIECE) if mesh is None else (gradient,)
        norms.setdefault(mesh, []).extend(torch.linalg.vector_norm(each, dtype=torch.float32) for each in pieces)
    of_meshes: list[Any] = [torch.linalg.vector_norm(torch.stack(each)) for each in norms.values()]
    norm = torch.linalg.vector_norm(
        torch.stack([each.full_tensor() if hasattr(each, "full_tensor") else each for each in of_meshes])
    )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    for gradient in gradients:
        _local(gradient).mul_(scale)
    return norm

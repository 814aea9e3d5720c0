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

With a HostMemory, low bits, states and gradient sums are in host memory, and visit the device piece by piece in a step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowpeak.errors import first_line
from lowpeak.memory import is_out_of_memory
from lowpeak.optim.formats import CompactTensor, TensorStep, WeightBits, update
from lowpeak.optim.gradient_sums import find_sum, gradient_of, local_part
from lowpeak.optim.host_memory import HostMemory

logger = logging.getLogger(__name__)

StepKernel = Callable[[TensorStep], None]

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


@dataclass(frozen=True)
class UpdatedShard:
    """The values of a parameter that this rank updates: [first, last) of those that it has, from `start` on in all of them.

    `publish` copies them to other ranks that have the parameter.
    """

    name: str
    start: int
    first: int
    last: int
    publish: Callable[[], None] = lambda: None


class CompactAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on bf16 weights with low bits and 8-bit states.

    With `weight_bits=32` and `state_bits=32` a step is that of torch.optim.AdamW on the fp32 weights. fp32 parameters, such as
    LoRA's, have no low bits. Gradients beyond 1.8e19, whose squares fp32 does not have, act as 1.8e19. States: step, low_bits,
    and exp_avg and exp_avg_sq in fp32 or as codes with `_scale`, all flat and of this rank's shard; in host memory with
    `offload`. `place` tells which values of the parameters a rank updates. Names, positions and `seed` decide the noise of 24
    and 16 bits.

        optimizer = CompactAdamW(model.parameters(), offload=True)
        for parameter in model.parameters():                         # only with offload, or for sums in another dtype
            GradientSum(parameter, torch.float32, optimizer.host(parameter))
        optimizer.place(shards)                                      # only if ranks share the update, or noise needs names
        loss.backward()                                              # once per micro-batch
        optimizer.step()                                             # empties the sums
        optimizer.zero_grad()
        optimizer.synchronize()                                      # before anything else reads the states
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
        offload: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.weight_bits, self.state_bits, self.seed = weight_bits, state_bits, seed
        self.offload = offload
        self._hosts: dict[torch.device, HostMemory] = {}
        self._shards: dict[nn.Parameter, UpdatedShard] = {}

    def place(self, shards: Mapping[nn.Parameter, UpdatedShard]) -> None:
        """Set the parameters' names, and which values of each this rank updates."""
        self._shards = dict(shards)

    def host(self, parameter: nn.Parameter) -> HostMemory | None:
        """Return the host memory of a parameter's states and gradients; None if they are beside the weights."""
        device = local_part(parameter).device
        if self.offload and device not in self._hosts:
            self._hosts[device] = HostMemory(device)
        return self._hosts.get(device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, in `.grad` or in a GradientSum, which is emptied."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated = []
        for group in self.param_groups:
            for parameter in group["params"]:
                gradients, shard = gradient_of(parameter), self.shard(parameter)
                if gradients is not None:
                    gradients = gradients[shard.first : shard.last]
                    self.update_tensor(parameter, gradients, group, step_kernel(local_part(parameter)))
                    _clear_sum(parameter)
                    updated.append(shard)
        for host in self._hosts.values():
            host.join()
        for shard in updated:
            shard.publish()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those in sums too."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                _clear_sum(parameter)

    def synchronize(self) -> None:
        """Wait until states in host memory are those of the last step."""
        for host in self._hosts.values():
            host.synchronize()

    def state_dict(self) -> dict[str, Any]:
        self.synchronize()
        return super().state_dict()

    def shard(self, parameter: nn.Parameter) -> UpdatedShard:
        """Return which values of a parameter this rank updates: by default all that it has."""
        return self._shards.get(parameter) or UpdatedShard("", 0, 0, local_part(parameter).numel())

    def update_tensor(
        self, parameter: nn.Parameter, gradients: Tensor, group: Mapping[str, Any], kernel: StepKernel | None
    ) -> None:
        """Update one parameter by flat gradients: by a kernel, or by torch's operations.

        States in host memory visit the device piece by piece.
        """
        self._state(parameter)["step"] += 1
        number, (beta1, beta2) = self.state[parameter]["step"], group["betas"]
        step = TensorStep(
            self.tensor(parameter),
            gradients,
            decay=1 - group["lr"] * group["weight_decay"],
            beta1=beta1,
            beta2=beta2,
            rate=group["lr"] / (1 - beta1**number),
            root=math.sqrt(1 - beta2**number),
            eps=group["eps"],
        )
        host, found = self.host(parameter), find_sum(parameter)
        if host is None:
            (kernel or update)(step)
        else:
            host.visit(step, kernel or update, None if found is None else found.factor)

    def tensor(self, parameter: nn.Parameter) -> CompactTensor:
        """Return this rank's values of a parameter: its weights and states, flat."""
        state = self._state(parameter)
        shard = self.shard(parameter)
        noise_key = f"{self.seed}/{state['step']}/{shard.name}"
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        weights = _flat(parameter)[shard.first : shard.last]
        return CompactTensor(weights, tensors, self.block(parameter), self.weight_bits or 32, noise_key, shard.start)

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return a parameter's state, of zeros before its first step."""
        state = self.state[parameter]
        if state:
            return state
        weights, shard, block = _flat(parameter), self.shard(parameter), self.block(parameter)
        size, host = shard.last - shard.first, self.host(parameter)
        zeros = weights.new_zeros if host is None else host.zeros
        state["step"] = 0
        if weights.dtype == torch.bfloat16 and self.weight_bits in (24, 32):
            state["low_bits"] = zeros(size, dtype=torch.int16 if self.weight_bits == 32 else torch.int8)
        for key, dtype in zip(MOMENTS, (torch.int8, torch.uint8), strict=True):
            state[key] = zeros(size, dtype=dtype if block else torch.float32)
            if block:
                state[f"{key}_scale"] = zeros(size // block, dtype=torch.float32)
        return state

    def block(self, parameter: nn.Parameter) -> int | None:
        """Return the values of a block, the largest divisor of a row up to 128; None for fp32 states.

        Beside bf16 weights, the fp32 ones of an adapter keep fp32 states.
        """
        beside_bf16 = parameter.dtype == torch.float32 and self.weight_bits is not None
        if self.state_bits == 32 or beside_bf16 or parameter.dim() < 2 or parameter.numel() < _SMALLEST_TENSOR:
            return None
        row = local_part(parameter).shape[1:].numel()
        return next((size for size in range(_BLOCK, _SMALLEST_BLOCK - 1, -1) if row % size == 0), None)

    def read(self, parameter: nn.Parameter, key: str, start: int, stop: int) -> Tensor:
        """Return a copy of values [start, stop) of this rank's shard in fp32; `key` is "weight" or one of MOMENTS."""
        self.synchronize()
        return self.tensor(parameter).read(key, start, stop)

    def write(self, parameter: nn.Parameter, values: Mapping[str, Tensor], step: int | None = None) -> None:
        """Store fp32 values of this rank's whole shard, under the keys of `read`; `step` sets the number of its steps."""
        if step is not None:
            self._state(parameter)["step"] = step
        self.synchronize()
        tensor = self.tensor(parameter)
        for key, real in values.items():
            tensor.write(key, real)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load states of a CompactAdamW with the same formats, or fp32 states of an AdamW."""
        self.synchronize()
        # torch would convert codes to the parameters' dtype.
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter, state = parameters[index], self._state(parameters[index])
            if not saved.keys() >= set(MOMENTS):
                raise ValueError(f"they are another optimizer's: {', '.join(saved)}; AdamW's are {', '.join(MOMENTS)}")
            if _are_plain(saved):
                shard = self.shard(parameter)
                moments = {key: _flat(saved[key])[shard.first : shard.last] for key in MOMENTS}
                self.write(parameter, moments, step=int(saved["step"]))
                continue
            if _formats(saved) != _formats(state):
                raise ValueError(f"the states of parameter {index} have another format or size")
            state["step"] = int(saved["step"])
            for key in _formats(state):
                state[key].copy_(saved[key])


def _are_plain(saved: Mapping[str, Any]) -> bool:
    """Return whether saved states are those of torch's AdamW: moments in fp32, and no low bits."""
    return all(saved[key].dtype == torch.float32 for key in MOMENTS) and "low_bits" not in saved


def _formats(state: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {key: (value.dtype, value.shape) for key, value in state.items() if key != "step"}


def _flat(tensor: Tensor) -> Tensor:
    return local_part(tensor).view(-1)


def _clear_sum(parameter: nn.Parameter) -> None:
    found = find_sum(parameter)
    if found is not None:
        found.clear()


def step_kernel(weights: Tensor) -> StepKernel | None:
    """Return the Triton kernel for weights on CUDA if it agrees with torch's operations there; None otherwise."""
    if not weights.is_cuda or isinstance(weights, FakeTensor):
        return None
    return _cuda_kernel(weights.device)


@cache
def _cuda_kernel(device: torch.device) -> StepKernel | None:
    if find_spec("triton") is None:
        return None
    try:
        from lowpeak.optim.triton_step import update as update_by_kernel

        difference = kernel_difference(update_by_kernel, device)
    # A compiler or a driver may raise anything.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        logger.warning("The optimizer steps without a Triton kernel: %s: %s.", type(error).__name__, first_line(error))
        return None
    if difference <= _ALLOWED:
        return update_by_kernel
    logger.warning(
        "The optimizer steps without a Triton kernel: it differs from torch's operations by %.2g.", difference
    )
    return None


def kernel_difference(kernel: StepKernel, device: torch.device) -> float:
    """Return how far a kernel's updates are from torch's after two steps in each format, over the updates' norm."""
    worst = 0.0
    for bits, state_bits, columns in _CHECKED:
        found = []
        for by in (kernel, None):
            generator = torch.Generator().manual_seed(0)
            values, gradient = (torch.randn(70, columns, generator=generator) for _ in range(2))
            dtype = torch.float32 if bits is None else torch.bfloat16
            weight = nn.Parameter(values.to(device, dtype))
            optimizer = CompactAdamW([weight], lr=1e-2, weight_bits=bits, state_bits=state_bits)
            start = weight.detach().float().view(-1)
            with torch.no_grad():
                for _ in range(2):
                    optimizer.update_tensor(weight, gradient.to(device, dtype).view(-1), optimizer.param_groups[0], by)
            read = [optimizer.read(weight, key, 0, weight.numel()) for key in ("weight", *MOMENTS)]
            found.append([read[0] - start, *read[1:]])
        worst = max(worst, *(float((one - other).norm() / other.norm()) for one, other in zip(*found, strict=True)))
    return worst


def find_compact(optimizer: Any) -> CompactAdamW | None:
    """Return the CompactAdamW in an optimizer or in accelerate's wrapper around it; None for other optimizers."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, CompactAdamW) else None


def clear_low_bits(optimizer: torch.optim.Optimizer) -> None:
    """Set the low bits of an optimizer that has some to 0, after something else has written the weights."""
    compact = find_compact(optimizer)
    if compact is not None:
        compact.synchronize()
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
        "offload": storage.offload,
        "seed": args.seed,
    }

"""The format in which a run stores trained weights, gradients and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lowpeak.arguments.declare import require
from lowpeak.arguments.text import show

STORAGE_ARGUMENTS = ("weight_bits", "state_bits", "gradient_bits", "offload_optimizer", "shard_optimizer_states")


@dataclass(frozen=True)
class StorageFormat:
    """The bytes in which trained weights, gradients and AdamW's states are stored; `weight_bits` None: fp32 weights.

    `offload`: all but the weights are in host memory. `shard_states`: under DDP each rank has the states of its rows alone.
    """

    weight_bits: Literal[16, 24, 32] | None
    state_bits: Literal[8, 32]
    gradient_bits: Literal[16, 32] = 16
    offload: bool = False
    shard_states: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that the model runs on."""
        return 4 if self.weight_bits is None else 2

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter beside the weight and its gradient: low bits and optimizer states with their scales."""
        low_bits = 0 if self.weight_bits is None else (self.weight_bits - 16) / 8
        return low_bits + (2 + 8 / 128 if self.state_bits == 8 else 8)

    @property
    def total_bytes(self) -> float:
        """Bytes per parameter of the weight, its gradient and its states."""
        return self.weight_bytes + self.gradient_bits / 8 + self.state_bytes

    def copied_bytes(self, num_batches: int) -> float:
        """Return bytes per parameter that `offload` copies in a step: each micro-batch's gradient, their sum, states both ways."""
        return self.weight_bytes * num_batches + self.gradient_bits / 8 + 2 * self.state_bytes

    def device_bytes(self, gradient_share: float = 1.0, state_share: float = 1.0) -> float:
        """Return bytes per parameter on the device beside the weight, if it has these shares of gradients and states."""
        return 0.0 if self.offload else gradient_share * self.gradient_bits / 8 + state_share * self.state_bytes

    def __str__(self) -> str:
        weights = {
            None: "fp32",
            32: "bf16 with 16 more bits beside them (exactly fp32)",
            24: "bf16 with 8 more bits beside them (stochastic rounding to 24 bits)",
            16: "bf16 (stochastic rounding, unbiased)",
        }[self.weight_bits]
        gradients = "fp32" if self.gradient_bits == 32 else "bf16"
        places = f", {self.weight_bytes} on the device and the others in host memory" if self.offload else ""
        places += ", low bits and states sharded over DDP's ranks" if self.shard_states else ""
        return (
            f"weights in {weights}, gradients in {gradients}, optimizer states in {self.state_bits} bits: "
            f"{self.total_bytes:.2f} bytes per parameter of large matrices{places}"
        )


def resolve_storage(args: Any) -> StorageFormat | None:
    """Return the format of trained weights and optimizer states; None for fp32, and for optimizers with formats of their own.

    `model_init_kwargs` with dtype "bfloat16" asks for `weight_bits=32`. If the run cannot have it, only an argument that asks for
    it by name raises ArgumentError.
    """
    dtype = dtype_argument(args)
    given = [show(name, value) for name in STORAGE_ARGUMENTS if (value := getattr(args, name)) not in (None, False)]
    obstacle = _storage_obstacle(args, dtype)
    require(not (given and obstacle), f"{' and '.join(given)} cannot be used: {obstacle}.")
    in_bf16 = dtype == "bfloat16" or args.weight_bits is not None
    if obstacle or not (in_bf16 or given):
        return None
    bits: Any = {name: getattr(args, name) or default for name, default in _default_bits(args, in_bf16).items()}
    return StorageFormat(**bits, offload=args.offload_optimizer, shard_states=args.shard_optimizer_states)


def _default_bits(args: Any, in_bf16: bool) -> dict[str, int | None]:
    if not in_bf16:
        return {"weight_bits": None, "state_bits": 32, "gradient_bits": 32}
    return {"weight_bits": 32, "state_bits": 8, "gradient_bits": 32 if args.offload_optimizer else 16}


def resolve_adapter_storage(args: Any) -> StorageFormat | None:
    """Return the format of a run that trains an adapter alone; None if no argument but those of its base's weights asks for one."""
    if not (args.state_bits or args.offload_optimizer or args.shard_optimizer_states):
        return None
    state_bits: Any = args.state_bits or 32
    return StorageFormat(None, state_bits, 32, args.offload_optimizer, args.shard_optimizer_states)


def rename_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of `from_pretrained` with `dtype` in place of its older name `torch_dtype`."""
    if kwargs.get("torch_dtype") is None:
        return kwargs
    renamed = {"dtype": kwargs["torch_dtype"], **kwargs}
    older = renamed.pop("torch_dtype")
    require(
        _dtype_name(renamed["dtype"]) == _dtype_name(older),
        f"model_init_kwargs has dtype {_dtype_name(renamed['dtype'])!r} and torch_dtype {_dtype_name(older)!r}, two names of one "
        "argument: remove one.",
    )
    return renamed


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_argument(args: Any) -> str:
    """Return the dtype in `model_init_kwargs` by its name; "None" without one."""
    return _dtype_name((args.model_init_kwargs or {}).get("dtype"))


def _storage_obstacle(args: Any, dtype: str) -> str:
    """Return why a run cannot store weights or states in few bits, with the remedy; "" if it can."""
    optim = str(getattr(args.optim, "value", args.optim))
    if args.uses_deepspeed:
        return "DeepSpeed keeps fp32 weights of its own; set bf16 and zero_optimization in its config instead"
    if optim not in ("adamw_torch", "adamw_torch_fused"):
        return f"optim={optim!r} stores weights and states itself; set optim='adamw_torch'"
    if args.weight_bits is not None and dtype not in ("None", "auto", "bfloat16"):
        return f"model_init_kwargs sets dtype {dtype!r}; remove one of the two"
    return ""

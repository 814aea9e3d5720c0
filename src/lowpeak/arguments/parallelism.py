"""What a run asks of accelerate, in the environment or in arguments: settled, or refused, before anything is loaded.

Nothing here loads torch. Whether what was asked for is also in force is known once devices are: `strategies.detect`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from lowpeak.arguments.declare import require
from lowpeak.errors import ArgumentError, require_package

_UNSUPPORTED = {"cp_size": "context", "sp_size": "sequence", "pp_size": "pipeline"}
_AXES = ("tp_size", "dp_shard_size", "dp_replicate_size", *_UNSUPPORTED)


@dataclass(frozen=True)
class Cut:
    """How a model is cut where it is loaded: its tensors over so many devices, and those parts over so many data ranks."""

    tensor: int = 1
    data: int = 1


WHOLE = Cut()


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Return whether a switch of accelerate's is on in the environment."""
    return environ.get(name, "false").lower() in ("true", "1")


def refuse_axes(sizes: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return a parallelism config's sizes; ArgumentError for an axis that lowpeak does not run, and for what is no number."""
    found = {}
    for axis in _AXES:
        size = sizes.get(axis) or 1
        try:
            found[axis] = int(size)
        except (TypeError, ValueError):
            raise ArgumentError(f"{where} has {axis}: {size}, which is no whole number.") from None
    for axis, words in _UNSUPPORTED.items():
        require(
            found[axis] <= 1,
            f"{axis}={found[axis]} in {where} asks for {words} parallelism, which lowpeak does not run (docs/distributed.md says "
            "why); use fsdp2, fsdp2-tp, zero3 or hsdp, and leave it out.",
        )
    return found


def settled_cut(environ: Mapping[str, str], parallelism: Any, beside: str = "") -> Cut:
    """Return how tensor parallelism cuts a model over the run's processes; ArgumentError for what cannot be `beside` it.

    The sizes are those of the argument parallelism_config, else of accelerate's config in the environment.
    """
    if parallelism is not None:
        where, sizes = "parallelism_config", {axis: getattr(parallelism, axis, 1) for axis in _AXES}
    elif is_on(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        where = "accelerate's parallelism config"
        sizes = {axis: environ.get(f"PARALLELISM_CONFIG_{axis.upper()}") for axis in _AXES}
    else:
        return WHOLE
    found = refuse_axes(sizes, where)
    tensor, data = found["tp_size"], found["dp_shard_size"]
    if tensor == 1:
        return WHOLE
    beside = beside or ("dp_replicate_size" if found["dp_replicate_size"] > 1 else "")
    require(
        not beside,
        f"tp_size={tensor} in {where} does not go with {beside}: leave that out; the preset fsdp2-tp, or tp_size and "
        "dp_shard_size, cut a model over tensors and data ranks.",
    )
    world = int(environ.get("WORLD_SIZE") or 1)
    fitting = "".join(f" or {n} x {world // n}" for n in range(2, world + 1) if world % n == 0)
    require(
        tensor * data == world,
        f"tp_size={tensor} x dp_shard_size={data} in {where} do not fill {world} processes: start {tensor * data}{fitting and ','}"
        f"{fitting}.",
    )
    return Cut(tensor, data)


def take_fsdp_over(environ: MutableMapping[str, str]) -> None:
    """Turn accelerate's FSDP off: beside tensor parallelism transformers cuts a model both ways as it loads it.

    (accelerate 1.15 would import what transformers 5 has no more.) ArgumentError where the parts are to lie in host memory.
    """
    if is_on(environ, "ACCELERATE_USE_FSDP"):
        require(
            not is_on(environ, "FSDP_OFFLOAD_PARAMS"),
            "fsdp_offload_params does not go with tensor parallelism: leave one of the two out.",
        )
        environ["ACCELERATE_USE_FSDP"] = "false"


def refuse_other_parallelism(environ: Mapping[str, str], loading: Mapping[str, Any]) -> None:
    """Raise ArgumentError for Megatron-LM, fp16 or fp8 of accelerate's, and for `from_pretrained` keywords that cut a model."""
    require(
        not is_on(environ, "ACCELERATE_USE_MEGATRON_LM"),
        "accelerate was configured for Megatron-LM, which lowpeak does not run: use fsdp2 or zero3.",
    )
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    require(
        precision in ("no", "bf16", ""),
        f"the accelerate config has mixed_precision: {precision}, and log-ratios need bf16's range or fp32: set it to bf16 or no.",
    )
    for name in ("tp_plan", "tp_size", "distributed_config", "device_mesh"):
        require(
            loading.get(name) is None,
            f"model_init_kwargs has {name}, which cuts the model behind the run's back: leave it out, and ask for tensor "
            "parallelism by tp_size of accelerate's parallelism config, or the preset fsdp2-tp.",
        )


def require_deepspeed(what: str) -> None:
    """Raise MissingPackageError unless DeepSpeed, which `what` needs, is installed."""
    require_package("deepspeed", what, "deepspeed", ", or use fsdp2, which needs nothing more")


def settle_deepspeed(config: MutableMapping[str, Any], args: Any) -> None:
    """Let the run's own arguments stand in DeepSpeed's config (accelerate's copy of it, which is changed).

    What the config says of clipping and of batches must be what the arguments say: how a step is cut into micro-batches is not
    DeepSpeed's to know here. Without `gradient_clipping` accelerate would clip at 1.0 whatever the run says. ArgumentError
    where it differs, and for stage 0, which shards nothing.
    """
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    require(
        str(stage) in ("1", "2", "3"),
        f"the DeepSpeed config has ZeRO stage {stage}: lowpeak runs 1, 2 and 3; where nothing is to be sharded use ddp.",
    )
    clipping, own_clipping = config.get("gradient_clipping", "auto"), float(args.max_grad_norm or 0.0)
    require(
        clipping == "auto" or float(clipping) == own_clipping,
        f"the DeepSpeed config has gradient_clipping={clipping} and the run max_grad_norm={args.max_grad_norm}: set "
        "gradient_clipping to auto, or leave it out, so that the run's own value clips.",
    )
    config["gradient_clipping"] = own_clipping
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    own = {
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": size * accumulation * args.world_size,
    }
    for name, value in own.items():
        said = config.get(name, "auto")
        require(
            said in ("auto", value),
            f"the DeepSpeed config has {name}={said}, and the run's arguments make {value}: set {name} to auto, or leave it out.",
        )
        if name in config and getattr(args, "hf_deepspeed_config", None) is None:  # else transformers has filled it in
            config[name] = "auto"  # the trainer's step is one mapping, and its accumulation 1


def refuse_fsdp1(version: Any, where: str) -> None:
    """Raise ArgumentError for FSDP of another version than 2; `where` is what asks for it."""
    require(
        str(version) == "2",
        f"{where} asks for FSDP version {version}, and lowpeak runs version 2 alone: set fsdp_version: 2. "
        "`accelerate to-fsdp2 --config_file FILE --output_file FILE` converts a config file. FSDP2 has no HYBRID_SHARD "
        "(use the preset hsdp) and no NO_SHARD (use ddp).",
    )

"""Parallelism requested from accelerate, in the environment or in arguments: checked before models are loaded.

Nothing here loads torch. `parallel.detect` checks that accelerate also uses what was requested.
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
class ModelParallel:
    """Sizes of tensor parallelism and of sharding over data ranks that a model is loaded with."""

    tensor: int = 1
    data: int = 1


NOT_PARALLEL = ModelParallel()


def is_switched_on(environ: Mapping[str, str], name: str) -> bool:
    """Return whether a switch of accelerate is on in the environment."""
    return environ.get(name, "false").lower() in ("true", "1")


def check_axes(sizes: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return the sizes of a parallelism config; ArgumentError for unsupported axes and for sizes that are not integers."""
    checked = {}
    for axis in _AXES:
        size = sizes.get(axis) or 1
        try:
            checked[axis] = int(size)
        except (TypeError, ValueError):
            raise ArgumentError(f"{where} has {axis}: {size}, which must be an integer.") from None
    for axis, words in _UNSUPPORTED.items():
        require(
            checked[axis] <= 1,
            f"{axis}={checked[axis]} in {where} requests {words} parallelism, which lowpeak does not support (docs/distributed.md "
            "says why); use fsdp2, fsdp2-tp, zero3 or hsdp, and remove it.",
        )
    return checked


def _requested_axes(environ: Mapping[str, str], parallelism: Any) -> tuple[str, dict[str, Any]]:
    """Return where parallelism is requested, and the size of each axis; 1 without a request."""
    if parallelism is not None:
        require(
            any(hasattr(parallelism, axis) for axis in _AXES),
            f"parallelism_config={parallelism!r} must be a ParallelismConfig of accelerate; a command line takes "
            "--accelerate_config fsdp2-tp instead.",
        )
        return "parallelism_config", {axis: getattr(parallelism, axis, 1) for axis in _AXES}
    if is_switched_on(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        sizes = {axis: environ.get(f"PARALLELISM_CONFIG_{axis.upper()}") for axis in _AXES}
        return "accelerate's parallelism config", sizes
    return "", dict.fromkeys(_AXES, 1)


def resolve_model_parallel(environ: Mapping[str, str], parallelism: Any, other: str = "") -> ModelParallel:
    """Return the sizes of tensor and data parallelism; ArgumentError if they conflict with `other` or with WORLD_SIZE.

    The sizes are those of the argument parallelism_config, else of accelerate's config in the environment. `other` names another
    kind of parallelism that the run requests.
    """
    where, sizes = _requested_axes(environ, parallelism)
    checked = check_axes(sizes, where)
    tensor, data = checked["tp_size"], checked["dp_shard_size"]
    if tensor == 1:
        return NOT_PARALLEL
    other = other or ("dp_replicate_size" if checked["dp_replicate_size"] > 1 else "")
    require(
        not other,
        f"tp_size={tensor} in {where} conflicts with {other}: remove the latter; use the preset fsdp2-tp, or tp_size and "
        "dp_shard_size, to shard a model over tensors and data ranks.",
    )
    world = int(environ.get("WORLD_SIZE") or 1)
    fitting = "".join(f" or {n} x {world // n}" for n in range(2, world + 1) if world % n == 0)
    require(
        tensor * data == world,
        f"tp_size={tensor} x dp_shard_size={data} in {where} does not match the {world} processes: start "
        f"{tensor * data}{fitting and ','}{fitting}.",
    )
    return ModelParallel(tensor, data)


def disable_accelerate_fsdp(environ: MutableMapping[str, str]) -> None:
    """Turn accelerate's FSDP off; ArgumentError if it offloads parameters to host memory.

    Under tensor parallelism transformers shards a model over both axes when it loads it.
    """
    # With both on, accelerate 1.15 would import a name that transformers 5 removed.
    if is_switched_on(environ, "ACCELERATE_USE_FSDP"):
        require(
            not is_switched_on(environ, "FSDP_OFFLOAD_PARAMS"),
            "fsdp_offload_params conflicts with tensor parallelism: remove one of the two.",
        )
        environ["ACCELERATE_USE_FSDP"] = "false"


def refuse_unsupported_parallelism(environ: Mapping[str, str], loading: Mapping[str, Any]) -> None:
    """Raise ArgumentError for Megatron-LM, accelerate's fp16 or fp8, and `from_pretrained` keywords that shard a model."""
    require(
        not is_switched_on(environ, "ACCELERATE_USE_MEGATRON_LM"),
        "accelerate is configured for Megatron-LM, which lowpeak does not support: use fsdp2 or zero3.",
    )
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    require(
        precision in ("no", "bf16", ""),
        f"the accelerate config has mixed_precision: {precision}, but log-probs need fp32 or bf16's range: set it to bf16 or no.",
    )
    for name in ("tp_plan", "tp_size", "distributed_config", "device_mesh"):
        require(
            loading.get(name) is None,
            f"model_init_kwargs has {name}, which would shard the model unknown to the run: remove it, and use tensor "
            "parallelism by tp_size in accelerate's parallelism config, or the preset fsdp2-tp.",
        )


_SIZES_BY_WIDTH = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def require_deepspeed(what: str) -> None:
    """Raise MissingPackageError unless DeepSpeed, which `what` needs, is installed."""
    require_package("deepspeed", what, "deepspeed", ", or use fsdp2, which needs no other package")


def sync_deepspeed_config(config: MutableMapping[str, Any], args: Any) -> None:
    """Write the run's precision, clipping and batch sizes into accelerate's copy of the DeepSpeed config.

    Absent sizes of ZeRO's buckets become `auto`, which accelerate derives from the model's width. ArgumentError if the config has
    other values, and for stage 0, which shards nothing.
    """
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    require(
        str(stage) in ("1", "2", "3"),
        f"the DeepSpeed config has ZeRO stage {stage}: lowpeak supports 1, 2 and 3; to shard nothing use ddp.",
    )
    _sync_precision(config, bool(args.bf16))
    # DeepSpeed's own sizes, 1 to 2 GB for buckets, are the peak of small models.
    for name in _SIZES_BY_WIDTH if str(stage) == "3" else _SIZES_BY_WIDTH[:1]:
        config["zero_optimization"].setdefault(name, "auto")
    clipping, max_norm = config.get("gradient_clipping", "auto"), float(args.max_grad_norm or 0.0)
    require(
        clipping == "auto" or float(clipping) == max_norm,
        f"the DeepSpeed config has gradient_clipping={clipping} but max_grad_norm={args.max_grad_norm}: set gradient_clipping to "
        "auto, or remove it.",
    )
    # Without gradient_clipping accelerate would clip at 1.0.
    config["gradient_clipping"] = max_norm
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    expected = {
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": size * accumulation * args.world_size,
    }
    for name, value in expected.items():
        configured = config.get(name, "auto")
        require(
            configured in ("auto", value),
            f"the DeepSpeed config has {name}={configured}, but the arguments give {value}: set {name} to auto, or remove it.",
        )
        # If transformers read the config, it has set these values. Otherwise `auto` lets accelerate set them to its view of a
        # step, which is one batch without accumulation, because the run forms micro-batches itself.
        if name in config and getattr(args, "hf_deepspeed_config", None) is None:
            config[name] = "auto"


def _sync_precision(config: MutableMapping[str, Any], bf16: bool) -> None:
    """Write the precision into a DeepSpeed config; ArgumentError if it has another one."""
    enabled = {name: (config.get(name) or {}).get("enabled", "auto") for name in ("bf16", "fp16")}
    require(
        enabled["bf16"] in ("auto", bf16) and enabled["fp16"] in ("auto", False),
        f"the DeepSpeed config has bf16.enabled={enabled['bf16']} and fp16.enabled={enabled['fp16']} but bf16={bf16}: set both "
        "to auto, or remove them.",
    )
    # Before a model is loaded: ZeRO-3 splits it in the config's dtype, and DeepSpeed does not convert it later.
    config["bf16"] = {**(config.get("bf16") or {}), "enabled": bf16}


def refuse_fsdp1(version: Any, where: str) -> None:
    """Raise ArgumentError for an FSDP version other than 2, which `where` requests."""
    require(
        str(version) == "2",
        f"{where} requests FSDP version {version}, but lowpeak supports only version 2: set fsdp_version: 2. "
        "`accelerate to-fsdp2 --config_file FILE --output_file FILE` converts a config file. FSDP2 has no HYBRID_SHARD "
        "(use the preset hsdp) and no NO_SHARD (use ddp).",
    )

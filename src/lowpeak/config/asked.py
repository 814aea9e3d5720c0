"""What a run asks of accelerate, in the environment or in arguments: settled, or refused, before anything is loaded.

Nothing here loads torch. Whether what was asked for is also in force is known once devices are: `strategies.detect`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from lowpeak.errors import ArgumentError, MissingPackageError

_AXES = {"cp_size": "context parallelism", "sp_size": "sequence parallelism", "pp_size": "pipeline parallelism"}
_SIZES = ("tp_size", "dp_shard_size", "dp_replicate_size")
_LOADING = ("tp_plan", "tp_size", "distributed_config", "device_mesh")


@dataclass(frozen=True)
class Cut:
    """How a model is cut where it is loaded: its tensors over so many devices, and those parts over so many data ranks."""

    tensor: int = 1
    data: int = 1


WHOLE = Cut()


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Whether a switch of accelerate's is on in the environment."""
    return environ.get(name, "false").lower() in ("true", "1")


def refuse_axes(sizes: Mapping[str, Any], where: str) -> None:
    """ArgumentError for a size above 1 of an axis by which lowpeak does not cut a model, or that is no number."""
    found = {axis: _whole(sizes.get(axis) or 1, axis, where) for axis in (*_SIZES, *_AXES)}
    for axis, words in _AXES.items():
        size = found[axis]
        if size > 1:
            raise ArgumentError(
                f"{axis}={size} in {where} asks for {words}, which lowpeak does not run (docs/distributed.md says why); "
                "use fsdp2, fsdp2-tp, zero3 or hsdp, and leave it out."
            )


def _whole(value: Any, name: str, where: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{where} has {name}: {value}, which is no whole number.") from None


def asked_sizes(environ: Mapping[str, str], parallelism: Any) -> tuple[dict[str, int], str]:
    """The sizes of accelerate's parallelism config, and where it stands: the argument, else the environment."""
    if parallelism is not None:
        where = "parallelism_config"
        return {axis: _whole(getattr(parallelism, axis, 1) or 1, axis, where) for axis in (*_SIZES, *_AXES)}, where
    if not is_on(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return {}, ""
    where = "accelerate's parallelism config"
    found = {axis: environ.get(f"PARALLELISM_CONFIG_{axis.upper()}") or 1 for axis in (*_SIZES, *_AXES)}
    return {axis: _whole(value, axis, where) for axis, value in found.items()}, where


def settled_cut(environ: Mapping[str, str], parallelism: Any, beside: str = "") -> Cut:
    """How tensor parallelism cuts a model over the run's processes; ArgumentError for what lowpeak does not run `beside` it."""
    sizes, where = asked_sizes(environ, parallelism)
    refuse_axes(sizes, where)
    tensor = sizes.get("tp_size", 1)
    if tensor == 1:
        return WHOLE
    beside = beside or ("dp_replicate_size" if sizes["dp_replicate_size"] > 1 else "")
    if beside:
        raise ArgumentError(
            f"tp_size={tensor} in {where} does not go with {beside}: leave that out; the preset fsdp2-tp, or tp_size and "
            "dp_shard_size, cut a model over tensors and data ranks."
        )
    world = int(environ.get("WORLD_SIZE") or 1)
    if tensor * sizes["dp_shard_size"] != world:
        raise ArgumentError(
            f"tp_size={tensor} and dp_shard_size={sizes['dp_shard_size']} in {where} do not fill {world} processes."
        )
    return Cut(tensor, sizes["dp_shard_size"])


def take_fsdp_over(environ: MutableMapping[str, str]) -> None:
    """Beside tensor parallelism FSDP2 is transformers', which cuts a model both ways as it loads it: accelerate gets told of none.

    (accelerate 1.15 would import what transformers 5 has no more.) ArgumentError where the parts are to lie in host memory.
    """
    if is_on(environ, "ACCELERATE_USE_FSDP"):
        if is_on(environ, "FSDP_OFFLOAD_PARAMS"):
            raise ArgumentError("fsdp_offload_params does not go with tensor parallelism: leave one of the two out.")
        environ["ACCELERATE_USE_FSDP"] = "false"


def refuse_other_parallelism(environ: Mapping[str, str], loading: Mapping[str, Any]) -> None:
    """ArgumentError for Megatron-LM, and for a model that would be cut by its loading alone: keywords of from_pretrained."""
    if is_on(environ, "ACCELERATE_USE_MEGATRON_LM"):
        raise ArgumentError(
            "accelerate was configured for Megatron-LM, which lowpeak does not run: use fsdp2 or zero3."
        )
    for name in _LOADING:
        if loading.get(name) is not None:
            raise ArgumentError(
                f"model_init_kwargs has {name}, which cuts the model behind the run's back: leave it out, and ask for tensor "
                "parallelism by tp_size of accelerate's parallelism config, or the preset fsdp2-tp."
            )


def refuse_half_precision(environ: Mapping[str, str]) -> None:
    """ArgumentError for fp16 or fp8 of an accelerate config, which are refused as arguments, too."""
    asked = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", "bf16", ""):
        raise ArgumentError(
            f"the accelerate config has mixed_precision: {asked}, and log-ratios need bf16's range or fp32: set it to bf16 or no."
        )


def require_deepspeed(what: str) -> None:
    """MissingPackageError unless DeepSpeed is installed; `what` ends in a verb: needs."""
    if find_spec("deepspeed") is None:
        raise MissingPackageError(
            f"{what} deepspeed, which is not installed; pip install 'lowpeak[deepspeed]', or use fsdp2, which needs "
            "nothing more."
        )


def settle_clipping(config: MutableMapping[str, Any], max_grad_norm: float) -> None:
    """Let the run's `max_grad_norm` clip in DeepSpeed's config (accelerate's copy of it, which is changed).

    Without `gradient_clipping` accelerate would clip at 1.0 whatever the run says; a number that differs from the run's is an
    ArgumentError.
    """
    clipping, own = config.get("gradient_clipping", "auto"), float(max_grad_norm or 0.0)
    if clipping != "auto" and float(clipping) != own:
        raise ArgumentError(
            f"the DeepSpeed config has gradient_clipping={clipping} and the run max_grad_norm={max_grad_norm}: set "
            "gradient_clipping to auto, or leave it out, so that the run's own value clips."
        )
    config["gradient_clipping"] = own


def settle_deepspeed(config: MutableMapping[str, Any], args: Any) -> None:
    """Let the run's own arguments stand in DeepSpeed's config (accelerate's copy of it, which is changed).

    What the config says of clipping and of batches must be what the arguments say: how a step is cut into micro-batches is not
    DeepSpeed's to know here. ArgumentError where it differs, and for stage 0, which shards nothing.
    """
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if str(stage) not in ("1", "2", "3"):
        raise ArgumentError(
            f"the DeepSpeed config has ZeRO stage {stage}: lowpeak runs 1, 2 and 3; where nothing is to be sharded use ddp."
        )
    settle_clipping(config, args.max_grad_norm)
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    own = {
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": size * accumulation * args.world_size,
    }
    for name, value in own.items():
        said = config.get(name, "auto")
        if said not in ("auto", value):
            raise ArgumentError(
                f"the DeepSpeed config has {name}={said}, and the run's arguments make {value}: set {name} to auto, or leave it "
                "out."
            )
        if name in config and getattr(args, "hf_deepspeed_config", None) is None:  # else transformers has filled it in
            config[name] = "auto"  # the trainer's step is one mapping, and its accumulation 1


def refuse_fsdp1(version: Any, where: str) -> None:
    """ArgumentError for FSDP of another version than 2; `where` is what asks for it."""
    if str(version) != "2":
        raise ArgumentError(
            f"{where} asks for FSDP version {version}, and lowpeak runs version 2 alone: set fsdp_version: 2. "
            "`accelerate to-fsdp2 --config_file FILE --output_file FILE` converts a config file. FSDP2 has no HYBRID_SHARD "
            "(use the preset hsdp) and no NO_SHARD (use ddp)."
        )

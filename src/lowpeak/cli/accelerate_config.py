"""accelerate configs, by preset name or file, read and checked before ranks are launched."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowpeak.arguments import check_axes, refuse_fsdp1, require_deepspeed
from lowpeak.errors import ArgumentError, closest_name, first_line

PRESET_FOLDER = Path(__file__).parent / "presets"
PRESETS = ("single", "ddp", "fsdp2", "fsdp2-offload", "hsdp", "fsdp2-tp", "zero1", "zero2", "zero3", "zero3-offload")
DEFAULT_PRESET = "fsdp2"  # for several devices without a config: it fits wherever another preset does
# TRL's names of presets. FSDP1 shards as FSDP2 does.
_TRL_PRESETS = {"single_gpu": "single", "multi_gpu": "ddp", "fsdp1": "fsdp2"}
_TYPES = ("NO", "MULTI_GPU", "MULTI_XPU", "FSDP", "DEEPSPEED")
_NUMBERS = ("num_processes", "num_machines", "machine_rank", "main_process_port")
# Groups of settings, and the prefix of their names as options of `accelerate launch`.
_GROUPS = {"deepspeed_config": "", "fsdp_config": "fsdp_", "parallelism_config": "", "dynamo_config": "dynamo_"}

# A name of older accelerate versions, which `accelerate to-fsdp2` keeps.
_OLDER = "fsdp_backward_prefetch_policy"


def find_accelerate_config(name: str) -> Path:
    """Return the file of a preset, or the path `name` itself; ArgumentError if neither exists."""
    preset = _TRL_PRESETS.get(name, name)
    path = PRESET_FOLDER / f"{preset}.yaml" if preset in PRESETS else Path(name)
    if not path.is_file():
        raise ArgumentError(
            f"accelerate_config={name!r} is neither a file nor a preset; the presets are {', '.join(PRESETS)}."
        )
    return path


def read_config(path: Path) -> Any:
    """Return the file as a checked accelerate ClusterConfig, with the full path of its DeepSpeed file.

    ArgumentError for settings that lowpeak does not support, MissingPackageError if DeepSpeed is needed and missing.
    """
    import yaml
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        config: Any = load_config_from_file(str(path))
    except (AttributeError, OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ArgumentError(
            f"accelerate_config {path} cannot be read: {first_line(error)} (`accelerate config` writes one; pass a "
            "DeepSpeed config as --deepspeed)."
        ) from error
    kind, place = config.distributed_type.value, config.compute_environment.value
    if kind not in _TYPES or place != "LOCAL_MACHINE":
        raise ArgumentError(
            f"{path} has distributed_type {kind} on {place}, which lowpeak does not support; the presets are "
            f"{', '.join(PRESETS)} (on CPUs: ddp or a ZeRO preset, with --use_cpu)."
        )
    _check_numbers(config, path)
    _check_groups(config, path)
    sizes = {name.removeprefix("parallelism_config_"): size for name, size in config.parallelism_config.items()}
    check_axes(sizes, str(path))
    if kind == "FSDP":
        version = config.fsdp_config.get("fsdp_version", config.fsdp_config.get("version", 1))
        refuse_fsdp1(version, str(path))
    elif kind == "DEEPSPEED":
        require_deepspeed(f"accelerate_config {path}")
        _find_deepspeed_file(config.deepspeed_config, path)
    return config


def _check_numbers(config: Any, path: Path) -> None:
    for name in _NUMBERS:
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ArgumentError(f"{path}: {name} must be an integer, got {value!r}.")


def _check_groups(config: Any, path: Path) -> None:
    """Make each group of settings a dict; raise ArgumentError for other values, and for names that accelerate would ignore."""
    from accelerate.commands.launch import launch_command_parser

    known = {action.dest for action in launch_command_parser()._actions} | {_OLDER}
    for group, prefix in _GROUPS.items():
        settings = getattr(config, group) or {}
        if not isinstance(settings, Mapping):
            raise ArgumentError(f"{path}: {group} must be a mapping of names to values, got {settings!r}.")
        setattr(config, group, dict(settings))
        names = [name if name.startswith(prefix) else prefix + name for name in settings]
        _check_names(names, known, f"{group} of {path}")


def _check_names(names: Sequence[str], known: Collection[str], where: str) -> None:
    for name in names:
        if name not in known:
            hint = closest_name(name, known) or "remove it."
            raise ArgumentError(f"{where} has {name}, which accelerate does not know; {hint}")


def _find_deepspeed_file(deepspeed: dict[str, Any], path: Path) -> None:
    """Make the path of the DeepSpeed file absolute if it is relative to the config's folder."""
    name = deepspeed.get("deepspeed_config_file")
    if name is not None and not Path(name).is_file():
        if not (path.parent / name).is_file():
            raise ArgumentError(f"{path} names the DeepSpeed config {name}, which does not exist.")
        deepspeed["deepspeed_config_file"] = str((path.parent / name).resolve())


def preset_text(name: str) -> str:
    """Return a preset as YAML for `accelerate launch --config_file`, with its JSON file's full path."""
    text = find_accelerate_config(name).read_text(encoding="utf-8")
    return text.replace(f"{name}.json", str(PRESET_FOLDER / f"{name}.json"))


def strategy_of(name: str) -> tuple[str, int]:
    """Return the planned strategy of a preset or of a config's file, and the size of its tensor parallel groups."""
    from lowpeak.parallel import SHARDINGS

    of_presets = {row.preset: row for row in SHARDINGS.values()}
    preset = of_presets.get(_TRL_PRESETS.get(name, name))
    if preset is not None:
        return preset.name, 2 if preset.splits_tensors else 1
    config = read_config(find_accelerate_config(name))
    kind = config.distributed_type.value
    if kind == "DEEPSPEED":
        return _zero_stage(config.deepspeed_config), 1
    axes = {axis.removeprefix("parallelism_config_"): size for axis, size in config.parallelism_config.items()}
    if (tensor := int(axes.get("tp_size") or 1)) > 1:
        return "tp", tensor
    return (_fsdp_placement(config, axes) if kind == "FSDP" else "single" if kind == "NO" else "ddp"), 1


def _fsdp_placement(config: Any, axes: Mapping[str, Any]) -> str:
    if int(axes.get("dp_replicate_size") or 1) > 1:
        return "hsdp"
    return "fsdp2-offload" if config.fsdp_config.get("fsdp_offload_params") else "fsdp2"


def _zero_stage(section: Mapping[str, Any]) -> str:
    """Return the strategy of accelerate's DeepSpeed section, or of the DeepSpeed file that it names."""
    stage, parts = section.get("zero_stage", 3), ("offload_optimizer", "offload_param")
    devices = [section.get(f"{part}_device") for part in parts]
    if section.get("deepspeed_config_file"):
        config = json.loads(Path(section["deepspeed_config_file"]).read_text(encoding="utf-8"))
        zero = config.get("zero_optimization") or {}
        stage, devices = zero.get("stage", 0), [(zero.get(part) or {}).get("device") for part in parts]
    if stage not in (1, 2, 3):
        raise ArgumentError(f"the DeepSpeed config has ZeRO stage {stage}: lowpeak supports 1, 2 and 3.")
    offloads = stage == 3 and all(device not in (None, "none") for device in devices)
    return f"zero{stage}-offload" if offloads else f"zero{stage}"

"""accelerate's configurations by name (the shipped presets) or file, read and checked before anything is launched."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowpeak.config.asked import refuse_axes, require_deepspeed
from lowpeak.config.fsdp1 import Converted, convert_fsdp1, is_fsdp1
from lowpeak.errors import ArgumentError, first_line

FOLDER = Path(__file__).parent / "presets"
ORDER = ("single", "ddp", "fsdp2", "fsdp2-offload", "hsdp", "fsdp2-tp", "zero1", "zero2", "zero3", "zero3-offload")
_NUMBERS = ("num_processes", "num_machines", "machine_rank", "main_process_port")
_GROUPS = {
    "deepspeed_config": "",
    "fsdp_config": "fsdp_",
    "parallelism_config": "",
    "dynamo_config": "dynamo_",
}  # and prefixes
_OLDER = ("fp16", "dynamo_backend")  # names that accelerate still translates
REPLICATED = ("NO", "MULTI_GPU", "MULTI_XPU")  # as `strategies.detect` runs them, the launcher of CPUs aside


@dataclass(frozen=True)
class AccelerateConfig:
    """A config as accelerate's launcher reads it, with FSDP1 converted; `converted` says what changed."""

    source: str
    settings: Mapping[str, Any]
    converted: Converted | None = None

    @property
    def kind(self) -> str:
        """accelerate's distributed type."""
        return str(self.settings.get("distributed_type", "NO"))

    @property
    def is_preset(self) -> bool:
        """Whether it is one that ships."""
        return self.source.startswith("preset ")

    @property
    def num_processes(self) -> int | None:
        """How many processes the file says, over all hosts; None where it leaves that open."""
        number = self.settings.get("num_processes") or -1
        return number if number > 0 else None

    @property
    def num_machines(self) -> int:
        """How many hosts the file says."""
        return self.settings.get("num_machines") or 1


def find(name: str) -> Path:
    """The file of a preset, or the file itself; ArgumentError that lists the presets."""
    preset = FOLDER / f"{name}.yaml"
    if name in ORDER and preset.is_file():
        return preset
    if Path(name).is_file():
        return Path(name)
    raise ArgumentError(
        f"accelerate_config={name!r} is neither a file nor a preset; the presets are {', '.join(ORDER)}."
    )


def read(name: str) -> AccelerateConfig:
    """The config of that name, checked; ArgumentError for what lowpeak does not run, MissingPackageError without DeepSpeed."""
    path = find(name)
    settings = _parsed(path)
    source = f"preset {name}" if path.parent == FOLDER else str(path)
    _check_kinds_of_values(settings, source)
    config = AccelerateConfig(source, settings)
    _check_kind(config)
    refuse_axes(_without(settings.get("parallelism_config"), "parallelism_config_"), source)
    if config.kind == "DEEPSPEED":
        require_deepspeed(f"accelerate_config={name!r} needs")
        config = AccelerateConfig(source, _with_file_beside(settings, path))
    elif config.kind == "FSDP":
        config = _as_fsdp2(config)
    _check_names(config)
    return config


def text_of(name: str) -> str:
    """A preset as YAML that `accelerate launch --config_file` can read from anywhere: it names its other file in full."""
    import yaml

    return yaml.safe_dump(dict(read(name).settings), sort_keys=False)


def _parsed(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ArgumentError(f"accelerate_config {path} cannot be read: {first_line(error)}.") from error
    if not isinstance(settings, dict) or "distributed_type" not in settings:
        raise ArgumentError(
            f"accelerate_config {path} is no config of accelerate's: it has no distributed_type (`accelerate config` writes "
            "one); a config of DeepSpeed's own is --deepspeed."
        )
    return settings


def _check_kinds_of_values(settings: Mapping[str, Any], source: str) -> None:
    """ArgumentError for a number or a group of settings that is something else."""
    for name, value in settings.items():
        if name in _NUMBERS and value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ArgumentError(f"{source} has {name}: {value}, which is no whole number.")
        if str(name).endswith("_config") and not isinstance(value, Mapping | None):
            raise ArgumentError(
                f"{source} has {name}: {value}, which is no group of settings: give each its name and value, indented below {name}."
            )


def _check_names(config: AccelerateConfig) -> None:
    """ArgumentError for a name that accelerate does not know: inside a group it would leave it unread without a word."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    _refuse_unknown(config.settings, {*ClusterConfig.__dataclass_fields__, *_OLDER}, config.source)
    read_by_it = {action.dest for action in launch_command_parser()._actions}
    for group, prefix in _GROUPS.items():
        given = config.settings.get(group) or {}
        names = {name if name.startswith(prefix) else prefix + name: name for name in given}
        _refuse_unknown(names, read_by_it, f"{group} of {config.source}")


def _refuse_unknown(given: Iterable[str], known: set[str], where: str) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; leave it out."
            raise ArgumentError(f"{where} has {name}, which accelerate does not know{hint}")


def _check_kind(config: AccelerateConfig) -> None:
    """ArgumentError for a distributed type that lowpeak does not run, or that accelerate's launcher starts one process of."""
    if config.kind == "MULTI_CPU":
        raise ArgumentError(
            f"{config.source} has distributed_type MULTI_CPU, which accelerate starts through MPI alone: use the preset ddp "
            "with --use_cpu."
        )
    if config.kind not in (*REPLICATED, "FSDP", "DEEPSPEED"):
        raise ArgumentError(
            f"{config.source} has distributed_type {config.kind}, which lowpeak does not run; the presets are "
            f"{', '.join(ORDER)}."
        )


def _with_file_beside(settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The settings with DeepSpeed's own file named in full, where it lies beside the config."""
    deepspeed = dict(settings.get("deepspeed_config") or {})
    if deepspeed.get("zero_stage", 1) not in (1, 2, 3):
        raise ArgumentError(
            f"{path} has zero_stage: {deepspeed['zero_stage']}; lowpeak runs 1, 2 and 3, or ddp for none."
        )
    name = deepspeed.get("deepspeed_config_file")
    if name is not None and not Path(name).is_file():
        beside = path.parent / name
        if not beside.is_file():
            raise ArgumentError(f"{path} names the DeepSpeed config {name}, which is not there.")
        deepspeed["deepspeed_config_file"] = str(beside.resolve())
    return {**settings, "deepspeed_config": deepspeed}


def _as_fsdp2(config: AccelerateConfig) -> AccelerateConfig:
    """The config with its FSDP1 settings converted, if it has such."""
    given = _without(config.settings.get("fsdp_config"), "fsdp_")
    if not is_fsdp1(given):
        return config
    converted = convert_fsdp1(given)
    fsdp = {f"fsdp_{name}": value for name, value in {**converted.settings, "version": 2}.items()}
    return AccelerateConfig(config.source, {**config.settings, "fsdp_config": fsdp}, converted)


def _without(settings: Mapping[str, Any] | None, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in (settings or {}).items()}

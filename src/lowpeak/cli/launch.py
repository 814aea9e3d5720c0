"""Starting a run on several devices: accelerate's launcher, called with the same command for every rank.

A process that a launcher has started (this one, `accelerate launch`, torchrun, srun) never launches again: with
`--accelerate_config` it takes the config's settings over, as accelerate's launcher would have put them into its environment.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lowpeak.cli.accelerate_config import AccelerateConfig, read
from lowpeak.cli.arguments import LaunchArguments
from lowpeak.errors import ArgumentError
from lowpeak.watch.orphans import PARENT, end_training_with_parent

logger = logging.getLogger(__name__)

MARK = "LOWPEAK_LAUNCHED"  # in the environment of ranks that `launch` started
_SETTINGS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "CUDA_VISIBLE_DEVICES")
_LAST_PORT = 65535
_SIZES = tuple(f"parallelism_config_{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp"))


@dataclass(frozen=True)
class Places:
    """Where the ranks run: how many hosts, how many processes on each, whether on CPUs."""

    hosts: int
    per_host: int
    on_cpu: bool

    @property
    def processes(self) -> int:
        """All ranks."""
        return self.hosts * self.per_host


def launch_or_join(told: LaunchArguments, command: Sequence[str], *, on_cpu: bool) -> int | None:
    """Start `command` (`grpo --model ...`) on every rank and return the exit status, once all have ended.

    None where this process is the one to run it: it is a rank already, or there is only one.
    """
    if MARK in os.environ:
        end_training_with_parent()
        return None
    given = {f.name: getattr(told, f.name) for f in fields(told) if getattr(told, f.name) is not None}
    _check_numbers(given)
    is_one_of_many = is_rank(os.environ)
    name = given.pop("accelerate_config", None)
    if name is None:
        _refuse(given, "there is no --accelerate_config; add it (ddp, fsdp2, zero3, ...)")
        return None
    config = read(name)
    joins = is_one_of_many or config.kind == "NO"
    places = _places_of_ranks(given, os.environ, on_cpu) if joins else _places_to_fill(given, config, on_cpu)
    if joins:
        others = {name: given[name] for name in given if name not in (*_SIZES, "num_processes")}
        _refuse(others, _LAUNCHED if is_one_of_many else _SINGLE)
    _check_devices(config, places)
    _tell_converted(config)
    words = [*_words(given | mesh_sizes(config, given, places)), "--num_processes", str(places.processes)]
    with _written(config) as file:
        if joins:
            _join(file, words)
            return None
        from lowpeak.cli.agent import run_agent

        return run_agent(
            ["--config_file", file, *words, "-m", "lowpeak", *command], {MARK: "1", PARENT: str(os.getpid())}
        )


def _tell_converted(config: AccelerateConfig) -> None:
    """One warning, by rank 0 alone, of what an FSDP1 config became."""
    if config.converted is not None and os.environ.get("RANK", "0") == "0":
        logger.warning(config.converted.sentence(config.source))


_SINGLE = "the config has this one process alone; take another one (ddp, fsdp2, zero3, ...), or remove it"
_LAUNCHED = "the processes run already, started by another launcher; leave it to that launcher"


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one of several, or as the only one."""
    world, rank = (_number(environ, name, default) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    if not 0 <= rank < world:
        raise ArgumentError(
            f"RANK={rank} and WORLD_SIZE={world} stand in the environment, which no launcher sets so: unset them, or start the "
            "run by a launcher."
        )
    return "LOCAL_RANK" in environ or world > 1


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name) or str(default)
    if not value.isdigit():
        raise ArgumentError(f"{name}={value} stands in the environment, which no launcher sets so: unset it.")
    return int(value)


def is_first(environ: Mapping[str, str]) -> bool:
    """Whether this process is the one that speaks for all."""
    return int(environ.get("RANK") or 0) == 0


def _check_numbers(given: Mapping[str, Any]) -> None:
    """ArgumentError for a count below 1, or for a host or port that there cannot be."""
    for name in ("num_processes", "num_machines", *_SIZES):
        if given.get(name, 1) < 1:
            raise ArgumentError(f"--{name} {given[name]} must be at least 1.")
    port = given.get("main_process_port", 0)
    if not 0 <= port <= _LAST_PORT:
        raise ArgumentError(f"--main_process_port {port} must be a port: 1 to {_LAST_PORT}, or 0 for one that is free.")


def _refuse(given: Mapping[str, Any], because: str) -> None:
    for name, value in given.items():
        raise ArgumentError(f"--{name} {value} has no effect: {because}.")


def _places_of_ranks(given: Mapping[str, Any], environ: Mapping[str, str], on_cpu: bool) -> Places:
    """Where a launcher has put the ranks."""
    world = int(environ.get("WORLD_SIZE") or 1)
    asked = given.get("num_processes", world)
    if asked != world:
        raise ArgumentError(f"--num_processes {asked} was asked for, and the number of processes here is {world}.")
    if "ACCELERATE_MIXED_PRECISION" in environ:
        raise ArgumentError(
            "`accelerate launch` has a config of its own: leave --accelerate_config out, or launch without."
        )
    local = int(environ.get("LOCAL_WORLD_SIZE") or world)
    return Places(world // local, local, on_cpu)


def _places_to_fill(given: Mapping[str, Any], config: AccelerateConfig, on_cpu: bool) -> Places:
    """Where to start ranks; ArgumentError where that is not said, or does not come out even."""
    hosts = _hosts(given, config)
    on_cpu = on_cpu or bool(config.settings.get("use_cpu"))
    processes = given.get("num_processes") or config.num_processes
    if processes is None:
        if on_cpu:
            raise ArgumentError("--num_processes is needed on CPUs: there are no devices to count.")
        processes = num_devices() * hosts
    if processes % hosts:
        raise ArgumentError(f"--num_processes {processes} does not divide among {hosts} hosts.")
    ids = given.get("gpu_ids")
    places = Places(hosts, processes // hosts, on_cpu)
    if ids and ids != "all" and places.per_host > len(ids.split(",")):
        raise ArgumentError(f"--gpu_ids {ids} names fewer devices than the {places.per_host} processes of a host.")
    return places


def _hosts(given: Mapping[str, Any], config: AccelerateConfig) -> int:
    """How many hosts the run is on; ArgumentError where this one does not know its place, or where they meet."""
    hosts = int(given.get("num_machines", config.num_machines))
    if hosts > 1:
        needed = ("machine_rank", "main_process_ip", "main_process_port")
        missing = [name for name in needed if given.get(name, config.settings.get(name)) is None]
        if missing:
            raise ArgumentError(f"a run on {hosts} hosts needs --{' and --'.join(missing)} on each of them.")
    host = given.get("machine_rank", config.settings.get("machine_rank")) or 0
    if not 0 <= host < hosts:
        raise ArgumentError(f"machine_rank {host} names no host: {hosts} of them are numbered from 0.")
    return hosts


def _check_devices(config: AccelerateConfig, places: Places) -> None:
    """ArgumentError where accelerate would train something else than was asked for, or on devices that are not there."""
    found = 0 if places.on_cpu else num_devices()
    if config.kind == "FSDP" and found == 0:
        raise ArgumentError(
            f"{config.source} shards over devices, and there is none here: on CPUs accelerate would train DDP in its place. "
            "Use ddp or a zero preset with --use_cpu."
        )
    if places.on_cpu or (config.kind == "NO" and places.processes == 1):
        return
    if found == 0:
        raise ArgumentError(f"{config.source} needs devices, and there is none here; --use_cpu trains on CPUs.")
    if places.per_host > found:
        raise ArgumentError(
            f"{places.per_host} processes on a host need as many devices, and this one has {found}: lower --num_processes "
            f"to at most {found * places.hosts}."
        )


def num_devices() -> int:
    """Accelerators of this host that processes may use; 0 on a machine with CPUs alone."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def mesh_sizes(config: AccelerateConfig, given: Mapping[str, Any], places: Places) -> dict[str, int]:
    """Copies of the model, devices that each is cut over by rows, and by tensors: as given, by the file, or as the preset
    has it for so many processes; they must fill the ranks."""
    own = config.settings.get("parallelism_config")
    if not own:
        _refuse(
            {name: given[name] for name in _SIZES if name in given}, "that is --accelerate_config hsdp, or fsdp2-tp"
        )
        return {}
    copies, parts, tensors = _SIZES
    sizes = {name: int(given.get(name) or own.get(name) or 1) for name in _SIZES}
    if config.is_preset:
        _check_hosts(sizes, given, places)
        sizes |= _of_preset(sizes, own, given, places)
    if math.prod(sizes.values()) != places.processes or (sizes[copies] > 1 and sizes[parts] < 2):
        raise ArgumentError(
            f"{sizes[copies]} copies cut over {sizes[parts]} x {sizes[tensors]} devices each do not fill {places.processes} "
            "processes."
        )
    return sizes


def _of_preset(
    sizes: Mapping[str, int], own: Mapping[str, Any], given: Mapping[str, Any], places: Places
) -> dict[str, int]:
    """What a preset leaves to the run: a copy on each host unless it cuts by tensor, each over the devices that are left."""
    copies, parts, tensors = _SIZES
    num_copies = sizes[copies] if tensors in own else int(given.get(copies) or places.hosts)
    num_parts = int(given.get(parts) or places.processes // (num_copies * sizes[tensors]))
    return {copies: num_copies, parts: num_parts}


def _check_hosts(sizes: Mapping[str, int], given: Mapping[str, Any], places: Places) -> None:
    """ArgumentError for a preset of hybrid sharding where there is one host, and for peers on several."""
    copies, parts, tensors = _SIZES
    if sizes[tensors] == 1 and places.hosts == 1 and copies not in given and parts not in given:
        raise ArgumentError(
            "hsdp keeps a copy of the model on each host, and there is one host: use fsdp2, or say how many copies with "
            "--parallelism_config_dp_replicate_size."
        )
    if places.per_host % sizes[tensors]:
        raise ArgumentError(
            f"--parallelism_config_tp_size {sizes[tensors]} does not divide the {places.per_host} processes of a host: tensors are "
            "cut over devices of one host."
        )


def _words(given: Mapping[str, Any]) -> list[str]:
    """The arguments as `accelerate launch` takes them; a free port where none was named."""
    given = {"main_process_port": 0, **given}
    return [word for name, value in given.items() if name != "num_processes" for word in (f"--{name}", str(value))]


class _written:
    """A context: the config as a file that accelerate reads, removed afterwards."""

    def __init__(self, config: AccelerateConfig) -> None:
        self._settings = dict(config.settings)

    def __enter__(self) -> str:
        import yaml

        with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="lowpeak-", delete=False) as file:
            yaml.safe_dump(self._settings, file)
        self._path = Path(file.name)
        return file.name

    def __exit__(self, *error: object) -> None:
        self._path.unlink(missing_ok=True)


def _join(file: str, words: Sequence[str]) -> None:
    """Put into this rank's environment what accelerate's launcher would have: its own functions say what."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    here = ["--config_file", file, *words, "--num_machines", "1", "-m", "lowpeak"]
    parsed = launch_command_parser().parse_args(here)
    try:
        args, defaults, _ = _validate_launch_command(parsed)
        if args.use_deepspeed:
            args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
            env = prepare_deepspeed_cmd_env(args)[1]
        elif args.use_fsdp or args.multi_gpu:
            env = prepare_multi_gpu_env(args)
        else:
            env = prepare_simple_launcher_cmd_env(args)[1]
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        raise ArgumentError(f"accelerate does not take the config: {error}") from error
    os.environ.update({name: value for name, value in env.items() if name.startswith(_SETTINGS)})

"""Starting a run on several devices: accelerate's launcher, called with the same command for every rank.

A process that a launcher has started (this one, `accelerate launch`, torchrun, srun) never launches again: with
`--accelerate_config` it takes the config's settings over, as accelerate's launcher would have put them into its environment.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from lowpeak.cli.accelerate_config import FOLDER, find, read
from lowpeak.cli.arguments import LaunchArguments
from lowpeak.errors import ArgumentError, first_line
from lowpeak.watchdog import PARENT, end_training_with_parent

MARK = "LOWPEAK_LAUNCHED"  # in the environment of ranks that `launch_or_join` started
_SETTINGS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "CUDA_VISIBLE_DEVICES")
_COPIES, _SHARDS, _TENSORS = _SIZES = tuple(
    f"parallelism_config_{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp")
)
_USER_ERROR = 2  # a rank's exit status after an error message to the user
_NEXT_STEP = "Correct --accelerate_config, or the arguments of devices beside it; LOWPEAK_TRACEBACK=1 shows more."
_LAUNCHER_ERRORS = (AssertionError, OSError, OverflowError, RuntimeError, TypeError, ValueError)


def launch_or_join(told: LaunchArguments, command: Sequence[str], *, on_cpu: bool) -> int | None:
    """Start `command` (`grpo --model ...`) on every rank and return the exit status once all have ended.

    None if this process is to run the command: it is a rank already, or there is only one.
    """
    if MARK in os.environ:
        end_training_with_parent()
        return None
    given = {f.name: getattr(told, f.name) for f in fields(told) if getattr(told, f.name) is not None}
    name = given.pop("accelerate_config", None)
    if name is None:
        _refuse(given, "there is no --accelerate_config; add it (ddp, fsdp2, zero3, ...)")
        return None
    for argument in ("num_processes", "num_machines", *_SIZES):
        if given.get(argument, 1) < 1:
            raise ArgumentError(f"--{argument} must be at least 1, got {given[argument]}.")
    path = find(name)
    config = read(path)
    if is_rank(os.environ) or config.distributed_type.value == "NO":
        _join(path, config, given)
        return None
    return run_launcher([*launch_words(path, config, given, 0 if on_cpu or config.use_cpu else None), *command])


def is_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process."""
    return "LOCAL_RANK" in environ or int(environ.get("WORLD_SIZE") or 1) > 1


def is_first(environ: Mapping[str, str]) -> bool:
    """Return whether this process is rank 0, which speaks for all."""
    return int(environ.get("RANK") or 0) == 0


def num_devices() -> int:
    """Return the number of this host's accelerators that processes may use; 0 on a machine with CPUs alone."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _refuse(given: Mapping[str, Any], because: str) -> None:
    for name, value in given.items():
        raise ArgumentError(f"--{name} {value} has no effect: {because}.")


def launch_words(path: Path, config: Any, given: Mapping[str, Any], devices: int | None) -> list[str]:
    """Return the arguments of `accelerate launch` that start `-m lowpeak` on each rank.

    `devices` is how many this host has (0: train on CPUs, None: count them). ArgumentError if the number of ranks is not given,
    does not divide among the hosts, or exceeds the devices.
    """
    on_cpu = devices == 0
    devices = num_devices() if devices is None else devices
    hosts = _hosts(path, config, given)
    ids = str(given.get("gpu_ids", "all" if config.gpu_ids is None else config.gpu_ids))
    devices = devices if ids == "all" else min(devices, len(ids.split(",")))
    processes = given.get("num_processes") or max(config.num_processes or 0, 0) or devices * hosts
    if not processes:
        raise ArgumentError("--num_processes is needed on CPUs: there are no devices to count.")
    if processes % hosts:
        raise ArgumentError(f"--num_processes {processes} does not divide among {hosts} hosts.")
    per_host = processes // hosts
    if per_host > devices and not on_cpu:
        raise ArgumentError(
            f"{per_host} processes on a host need as many devices, and this one has {devices}: lower --num_processes to at most "
            f"{devices * hosts}, or train on CPUs with --use_cpu (ddp or a ZeRO preset)."
        )
    # Port 0 is one that is free.
    port = {"main_process_port": 0} if config.main_process_port is None else {}
    settings = {**port, **given, "num_processes": processes, **_sizes(path, config, given, hosts, per_host)}
    return [*_as_words(path, config, settings), "-m", "lowpeak"]


def _hosts(path: Path, config: Any, given: Mapping[str, Any]) -> int:
    """Return how many hosts the run is on; ArgumentError if this host's number, or where they meet, is not known."""
    hosts = int(given.get("num_machines") or config.num_machines or 1)
    needed = ("machine_rank", "main_process_ip", "main_process_port")
    in_file = {} if path.parent == FOLDER else vars(config)  # a preset knows no hosts
    missing = [name for name in needed if given.get(name, in_file.get(name)) is None]
    if hosts > 1 and missing:
        raise ArgumentError(f"a run on {hosts} hosts needs --{' and --'.join(missing)} on each of them.")
    host = given.get("machine_rank", config.machine_rank) or 0
    if not 0 <= host < hosts:
        raise ArgumentError(f"--machine_rank {host} names no host: they are numbered from 0 to {hosts - 1}.")
    port = given.get("main_process_port", config.main_process_port)
    if port is not None and not 0 <= port < 1 << 16:
        raise ArgumentError(
            f"--main_process_port {port} is no port: use one from 1 to 65535, or 0 for any that is free."
        )
    return hosts


def _sizes(path: Path, config: Any, given: Mapping[str, Any], hosts: int, per_host: int) -> dict[str, int]:
    """Return the mesh's sizes as given or as the file has them; ArgumentError if they do not fill the processes."""
    own = config.parallelism_config
    if not own:
        others = {name: given[name] for name in _SIZES if name in given}
        _refuse(others, "the config has no parallelism_config, as --accelerate_config hsdp and fsdp2-tp have")
        return {}
    sizes = {name: int(given.get(name) or own.get(name, 1)) for name in _SIZES}
    if path.parent == FOLDER:
        sizes |= _preset_sizes(path.stem, given, sizes[_TENSORS], hosts, per_host)
    processes = hosts * per_host
    if math.prod(sizes.values()) != processes or (sizes[_COPIES] > 1 and sizes[_SHARDS] < 2):
        shape = " x ".join(f"{name.split('_', 2)[2]}={size}" for name, size in sizes.items())
        raise ArgumentError(
            f"{shape} does not fill {processes} processes, with several shards in each of several copies."
        )
    return sizes


def _preset_sizes(preset: str, given: Mapping[str, Any], tensors: int, hosts: int, per_host: int) -> dict[str, int]:
    """Return the sizes that a preset leaves to the run: copies (hsdp: one a host), and rows over the devices that are left."""
    if preset == "hsdp" and hosts == 1 and not {_COPIES, _SHARDS} & given.keys():
        raise ArgumentError(
            "hsdp keeps a copy of the model on each host, and there is one host: use fsdp2, or say how many copies with "
            f"--{_COPIES}."
        )
    if per_host % tensors:
        raise ArgumentError(
            f"--{_TENSORS} {tensors} does not divide the {per_host} processes of a host: tensors are sharded over devices of one "
            "host."
        )
    copies = given.get(_COPIES) or (hosts if preset == "hsdp" else 1)
    return {_COPIES: copies, _SHARDS: given.get(_SHARDS) or hosts * per_host // (copies * tensors)}


def _as_words(path: Path, config: Any, settings: Mapping[str, Any]) -> list[str]:
    """Return settings as `accelerate launch` takes them, which override those of the file."""
    file = config.deepspeed_config.get("deepspeed_config_file")
    settings = {"config_file": path, **({"deepspeed_config_file": file} if file else {}), **settings}
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def _join(path: Path, config: Any, given: dict[str, Any]) -> None:
    """Put into this rank's environment what accelerate's launcher would have: its own functions say what."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    world = int(os.environ.get("WORLD_SIZE") or 1)
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
    asked = given.pop("num_processes", world)
    if asked != world:
        raise ArgumentError(f"--num_processes {asked} was given, and the number of processes here is {world}.")
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise ArgumentError(
            "`accelerate launch` has a config already: leave out --accelerate_config, or `accelerate launch`."
        )
    others = {name: value for name, value in given.items() if name not in _SIZES}
    _refuse(
        others, "another launcher started the processes" if is_rank(os.environ) else "the config has one process alone"
    )
    settings = {"num_processes": world, "num_machines": 1, "main_process_port": 0}
    settings |= _sizes(path, config, given, world // local, local)
    try:
        words = [*_as_words(path, config, settings), "-m", "lowpeak"]
        args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
        if args.use_deepspeed:
            args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
            environ = prepare_deepspeed_cmd_env(args)[1]
        elif args.use_fsdp or args.multi_gpu:
            environ = prepare_multi_gpu_env(args)
        else:
            environ = prepare_simple_launcher_cmd_env(args)[1]
    except _LAUNCHER_ERRORS as error:
        raise ArgumentError(f"accelerate does not take {path}: {first_line(error)}. {_NEXT_STEP}") from error
    os.environ.update({name: value for name, value in environ.items() if name.startswith(_SETTINGS)})


def run_launcher(words: Sequence[str]) -> int:
    """Call `accelerate launch` with these words and return the run's exit status.

    It is 0, that of the rank that failed first, 128 + the signal that ended it, or 130 after Ctrl-C.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = launch_command_parser().parse_args(list(words))
    args.signals_to_handle = "SIGTERM,SIGHUP,SIGQUIT"  # torch's agent ends the ranks on these; Ctrl-C is ours
    os.environ.update({MARK: "1", PARENT: str(os.getpid())})
    if os.environ.get("LOWPEAK_TRACEBACK", "0") in ("", "0"):  # ranks speak for themselves
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with _ctrl_c_passed_on() as presses:
        try:
            launch_command(args)
        except ChildFailedError as failed:
            return 130 if presses else _report(*failed.get_first_failure())
        except SignalException as ended:
            return 128 + int(ended.sigval)
        except _LAUNCHER_ERRORS as error:
            raise ArgumentError(f"the processes cannot be started: {first_line(error)}. {_NEXT_STEP}") from error
    return 130 if presses else 0


def _report(rank: int, failure: Any) -> int:
    """Return the exit status for that of a rank; name the rank if it could not say itself why it ended."""
    code: int = failure.exitcode
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (which the system does when the host's memory is full)" if name == "SIGKILL" else ""
        print(f"lowpeak: error: rank {rank} was ended by {name}{hint}, and the run with it.", file=sys.stderr)
        return 128 - code
    if code != _USER_ERROR:
        print(f"lowpeak: error: rank {rank} ended with status {code}; its output stands above.", file=sys.stderr)
    return code


@contextmanager
def _ctrl_c_passed_on() -> Iterator[list[int]]:
    """Pass the first Ctrl-C on to the ranks, which finish their step and save; the second ends them. Yield the list of presses.

    The ranks have separate sessions, so a terminal does not reach them; torch's agent would kill them 30 s after the first.
    """
    import psutil  # type: ignore[import-untyped]
    from torch.distributed.elastic.multiprocessing.api import SignalException

    presses: list[int] = []

    def press(signum: int, frame: FrameType | None) -> None:
        presses.append(signum)
        ranks = psutil.Process().children()
        if len(presses) > 1 or not ranks:
            raise SignalException("interrupted", signal.SIGINT)
        for rank in ranks:
            rank.send_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)

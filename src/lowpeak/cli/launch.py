"""Launch of a run on several devices: accelerate's launcher runs the same command on every rank.

A process that a launcher started (this one, `accelerate launch`, torchrun, srun) never launches again: with
`--accelerate_config` it sets the environment variables that accelerate's launcher would have set.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from lowpeak.cli.accelerate_config import DEFAULT_PRESET, PRESET_FOLDER, find_accelerate_config, read_config
from lowpeak.cli.arguments import LaunchArguments
from lowpeak.cli.cloud_files import LEAD_SECONDS
from lowpeak.cli.devices import num_devices
from lowpeak.cpu_cores import THREADS_VARIABLE, allowed_cores
from lowpeak.errors import ArgumentError, first_line
from lowpeak.watchdog import PARENT_VARIABLE, exit_training_with_parent

LAUNCHED = "LOWPEAK_LAUNCHED"  # set in the environment of ranks that `launch_or_join` started
_SETTINGS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "CUDA_VISIBLE_DEVICES")
_DP_REPLICATE, _DP_SHARD, _TP = _MESH_SIZES = tuple(
    f"parallelism_config_{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp")
)
_USER_ERROR = 2  # a rank's exit status after an error message to the user
_NEXT_STEP = "Correct --accelerate_config or the other device arguments; set LOWPEAK_TRACEBACK=1 to see the traceback."
_LAUNCHER_ERRORS = (AssertionError, OSError, OverflowError, RuntimeError, TypeError, ValueError)


def _check_counts(given: Mapping[str, Any]) -> None:
    for argument in ("num_processes", "num_machines", *_MESH_SIZES):
        if given.get(argument, 1) < 1:
            raise ArgumentError(f"--{argument} must be at least 1, got {given[argument]}.")


def launch_or_join(arguments: LaunchArguments, command: Sequence[str], output_dir: Path, *, on_cpu: bool) -> int | None:
    """Run `command` (`grpo --model ...`) on every rank; return the exit status when all have ended.

    Return None if this process is to run the command: it is a rank, or the only process.
    """
    if LAUNCHED in os.environ:
        exit_training_with_parent()
        return None
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    name = given.pop("accelerate_config", None) or _default_preset(given, on_cpu)
    if name is None:
        _refuse_unused(given, "there is no --accelerate_config; add it (ddp, fsdp2, zero3, ...)")
        return None
    _check_counts(given)
    path = find_accelerate_config(name)
    config = read_config(path)
    if is_rank(os.environ) or config.distributed_type.value == "NO":
        _join_launched_run(path, config, given)
        return None
    words = launcher_arguments(path, config, given, 0 if on_cpu or config.use_cpu else None)
    # accelerate and torch give each of several ranks one thread.
    local_ranks = int(words[words.index("--num_processes") + 1]) // _hosts(path, config, given)
    os.environ.setdefault(THREADS_VARIABLE, str(max(1, allowed_cores() // local_ranks)))
    return run_launcher([*words, *command], output_dir)


def output_folder(given: Mapping[str, Any]) -> Path:
    """Return the output folder of a command from its arguments, before the trainer's config exists."""
    return Path(given.get("output_dir") or "trainer_output")  # transformers' default


def _default_preset(given: Mapping[str, Any], on_cpu: bool) -> str | None:
    """Return the preset of a command that asks for several processes without a config; None for other commands."""
    if is_rank(os.environ) or max(given.get("num_processes", 1), given.get("num_machines", 1)) < 2:
        return None
    return "ddp" if on_cpu else DEFAULT_PRESET


def is_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process."""
    return "LOCAL_RANK" in environ or int(environ.get("WORLD_SIZE") or 1) > 1


def is_rank_zero(environ: Mapping[str, str]) -> bool:
    """Return whether this process is rank 0, which prints for all ranks."""
    return int(environ.get("RANK") or 0) == 0


def _refuse_unused(given: Mapping[str, Any], reason: str) -> None:
    for name, value in given.items():
        raise ArgumentError(f"--{name} {value} has no effect: {reason}.")


def launcher_arguments(path: Path, config: Any, given: Mapping[str, Any], devices: int | None) -> list[str]:
    """Return the arguments of `accelerate launch` that start `-m lowpeak` on each rank.

    `devices` is the number of devices of this host (0: train on CPUs, None: count them). ArgumentError if the number of ranks is
    unknown, is not a multiple of the hosts, or exceeds the devices.
    """
    on_cpu = devices == 0
    devices = num_devices() if devices is None else devices
    hosts = _hosts(path, config, given)
    ids = str(given.get("gpu_ids", "all" if config.gpu_ids is None else config.gpu_ids))
    devices = devices if ids == "all" else min(devices, len(ids.split(",")))
    processes = _num_processes(config, given, hosts, devices, on_cpu=on_cpu)
    port = config.main_process_port or 0  # 0: any free port
    settings = {"main_process_port": port, **given, "num_processes": processes}
    settings |= _mesh_sizes(path, config, given, hosts, processes // hosts)
    return [*_as_options(path, config, settings), "-m", "lowpeak"]


def _num_processes(config: Any, given: Mapping[str, Any], hosts: int, devices: int, *, on_cpu: bool) -> int:
    """Return the number of ranks: the one that is set, else one for each of the `devices` of a host."""
    processes: int = given.get("num_processes") or max(config.num_processes or 0, 0) or devices * hosts
    if not processes:
        raise ArgumentError("--num_processes is required on CPUs: there are no devices to count.")
    if processes % hosts:
        raise ArgumentError(f"--num_processes {processes} must be a multiple of the {hosts} hosts.")
    per_host = processes // hosts
    if per_host > devices and not on_cpu:
        fewer = f"lower --num_processes to at most {devices * hosts}, or " if devices else ""
        raise ArgumentError(
            f"{per_host} processes per host need as many devices, but this host has {devices}: {fewer}train on CPUs with --use_cpu "
            "(ddp or a ZeRO preset)."
        )
    return processes


def _hosts(path: Path, config: Any, given: Mapping[str, Any]) -> int:
    """Return the number of hosts; ArgumentError if this host's rank or the address of host 0 is missing or invalid."""
    hosts = int(given.get("num_machines") or config.num_machines or 1)
    needed = ("machine_rank", "main_process_ip", "main_process_port")
    in_file = {} if path.parent == PRESET_FOLDER else vars(config)  # a preset sets no hosts
    missing = [name for name in needed if given.get(name, in_file.get(name)) is None]
    if hosts > 1 and missing:
        raise ArgumentError(f"a run on {hosts} hosts needs --{' and --'.join(missing)} on each of them.")
    host = given.get("machine_rank", config.machine_rank) or 0
    if not 0 <= host < hosts:
        raise ArgumentError(f"--machine_rank {host} must be from 0 to {hosts - 1}.")
    _check_port(given.get("main_process_port", config.main_process_port))
    return hosts


def _check_port(port: int | None) -> None:
    if port is not None and not 0 <= port < 1 << 16:
        raise ArgumentError(f"--main_process_port {port} is not a port: use 1 to 65535, or 0 for any free port.")


def _mesh_sizes(path: Path, config: Any, given: Mapping[str, Any], hosts: int, per_host: int) -> dict[str, int]:
    """Return the mesh sizes from arguments or the file; ArgumentError if their product is not the number of processes."""
    in_file = config.parallelism_config
    if not in_file:
        others = {name: given[name] for name in _MESH_SIZES if name in given}
        _refuse_unused(others, "the config has no parallelism_config, as --accelerate_config hsdp and fsdp2-tp have")
        return {}
    sizes = {name: int(given.get(name) or in_file.get(name, 1)) for name in _MESH_SIZES}
    if path.parent == PRESET_FOLDER:
        sizes |= _preset_sizes(path.stem, given, sizes[_TP], hosts, per_host)
    processes = hosts * per_host
    if math.prod(sizes.values()) != processes or (sizes[_DP_REPLICATE] > 1 and sizes[_DP_SHARD] < 2):
        shape = " x ".join(f"{name.split('_', 2)[2]}={size}" for name, size in sizes.items())
        raise ArgumentError(
            f"{shape} does not fill {processes} processes, with several shards in each of several copies."
        )
    return sizes


def _preset_sizes(preset: str, given: Mapping[str, Any], tensors: int, hosts: int, per_host: int) -> dict[str, int]:
    """Return the sizes that a preset leaves open: copies (hsdp: one per host), and shards over the remaining devices."""
    if preset == "hsdp" and hosts == 1 and not {_DP_REPLICATE, _DP_SHARD} & given.keys():
        raise ArgumentError(
            "hsdp keeps a copy of the model on each host, but there is one host: use fsdp2, or set the number of copies with "
            f"--{_DP_REPLICATE}."
        )
    if per_host % tensors:
        raise ArgumentError(
            f"--{_TP} {tensors} must divide the {per_host} processes of a host: tensors are sharded over devices of one "
            "host."
        )
    copies = given.get(_DP_REPLICATE) or (hosts if preset == "hsdp" else 1)
    return {_DP_REPLICATE: copies, _DP_SHARD: given.get(_DP_SHARD) or hosts * per_host // (copies * tensors)}


def _as_options(path: Path, config: Any, settings: Mapping[str, Any]) -> list[str]:
    """Return settings as options of `accelerate launch`, which override those of the file."""
    file = config.deepspeed_config.get("deepspeed_config_file")
    settings = {"config_file": path, **({"deepspeed_config_file": file} if file else {}), **settings}
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def _launcher_environment(words: list[str]) -> dict[str, str]:
    """Return the environment that `accelerate launch` with these arguments would make, by its own functions."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    environ: dict[str, str]
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        environ = prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.multi_gpu:
        environ = prepare_multi_gpu_env(args)
    else:
        environ = prepare_simple_launcher_cmd_env(args)[1]
    return environ


def _join_launched_run(path: Path, config: Any, given: dict[str, Any]) -> None:
    """Set the environment variables that accelerate's launcher would have set."""
    world = int(os.environ.get("WORLD_SIZE") or 1)
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
    processes = given.pop("num_processes", world)
    if processes != world:
        raise ArgumentError(f"--num_processes {processes} contradicts the {world} processes that the launcher started.")
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise ArgumentError(
            "`accelerate launch` has set a config already: remove --accelerate_config, or start without `accelerate launch`."
        )
    others = {name: value for name, value in given.items() if name not in _MESH_SIZES}
    _refuse_unused(
        others, "another launcher started the processes" if is_rank(os.environ) else "the config has only one process"
    )
    settings = {"num_processes": world, "num_machines": 1, "main_process_port": 0}
    settings |= _mesh_sizes(path, config, given, world // local, local)
    try:
        environ = _launcher_environment([*_as_options(path, config, settings), "-m", "lowpeak"])
    except _LAUNCHER_ERRORS as error:
        raise ArgumentError(f"accelerate does not accept {path}: {first_line(error)}. {_NEXT_STEP}") from error
    os.environ.update({name: value for name, value in environ.items() if name.startswith(_SETTINGS)})


def run_launcher(words: Sequence[str], output_dir: Path) -> int:
    """Call `accelerate launch` with these options and return the run's exit status.

    The status is 0, that of the first rank that failed, 128 + the signal that ended this rank, or 130 after Ctrl-C. Ranks that
    have failed are launched again if one of them recorded smaller sizes in `output_dir`, which are smaller each time.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    os.environ.update({LAUNCHED: "1", PARENT_VARIABLE: str(os.getpid())})
    # torch's agent would kill the ranks 30 s after it passed SIGTERM on: they finish their step and save.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(LEAD_SECONDS))
    if os.environ.get("LOWPEAK_TRACEBACK", "0") in ("", "0"):  # ranks report their own errors
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with _forward_ctrl_c() as presses:
        try:
            failure = _launch_until_done(words, output_dir, presses)
        except SignalException as ended:
            return 128 + int(ended.sigval)
        except _LAUNCHER_ERRORS as error:
            raise ArgumentError(f"the processes cannot be started: {first_line(error)}. {_NEXT_STEP}") from error
    if presses:
        return 130
    return 0 if failure is None else _exit_status(*failure)


def _launch_until_done(words: Sequence[str], output_dir: Path, presses: Sequence[int]) -> tuple[int, Any] | None:
    """Launch the ranks, and again after an out-of-memory error that recorded smaller sizes; return the last failure."""
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from lowpeak.setup import RELAUNCHES
    from lowpeak.training import read_sizes

    relaunches = 0
    while True:
        os.environ[RELAUNCHES] = str(relaunches)
        earlier = read_sizes(output_dir)
        try:
            launch_command(_parse_options(words, relaunches))
            return None
        except ChildFailedError as failed:
            record = read_sizes(output_dir)
            if presses or record in ({}, earlier):  # no rank has recorded sizes in this launch
                return failed.get_first_failure()
            _print_restart(record)
            relaunches += 1


def _parse_options(words: Sequence[str], relaunches: int) -> Any:
    from accelerate.commands.launch import launch_command_parser

    args = launch_command_parser().parse_args(list(words))
    args.signals_to_handle = "SIGTERM,SIGHUP,SIGQUIT"  # on these torch's agent ends the ranks; not on Ctrl-C
    # Each launch has another port: a host may begin the next one while host 0 still has the store of the last.
    args.main_process_port = args.main_process_port and args.main_process_port + relaunches
    return args


def _print_restart(record: Mapping[str, Any]) -> None:
    sizes = ", ".join(f"{name} {value}" for name, value in record["sizes"].items())
    print(
        f"lowpeak: out of memory in phase {record['phase']} ({record['reason'].rstrip('.')}): the run starts again with {sizes}.",
        file=sys.stderr,
        flush=True,
    )


def _exit_status(rank: int, failure: Any) -> int:
    """Return the exit status for a rank's failure; print the rank's end if the rank could not report it."""
    code: int = failure.exitcode
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the system does this when host memory is full)" if name == "SIGKILL" else ""
        print(f"lowpeak: error: rank {rank} was ended by {name}{hint}, so the run ended.", file=sys.stderr)
        return 128 - code
    if code != _USER_ERROR:
        print(f"lowpeak: error: rank {rank} ended with status {code}; see its output above.", file=sys.stderr)
    return code


@contextmanager
def _forward_ctrl_c() -> Iterator[list[int]]:
    """Forward the first Ctrl-C to the ranks, which finish their step and save; end them at the second. Yield the presses.

    Ranks have separate sessions, so a terminal does not signal them; torch's agent would kill them 30 s after the first Ctrl-C.
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

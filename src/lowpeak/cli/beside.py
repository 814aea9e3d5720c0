"""`--train_devices` and `--vllm_devices`: one command runs vLLM servers and the trainer beside them, each on devices of its own.

The trainer is the same command again, in a process that sees the training devices alone and is told where the servers are. Here is
what to start, from what the command was told; `supervisor.py` runs it.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowpeak.cli.arguments import ModelArguments
from lowpeak.cli.devices import check_apart, check_there, named
from lowpeak.cli.launch import MARK, is_rank, num_devices
from lowpeak.cli.supervisor import ServersAndTrainer, Supervisor
from lowpeak.config.vllm_kwargs import engine_kwargs
from lowpeak.errors import ArgumentError
from lowpeak.rollout.vllm.build import NO_SHARE
from lowpeak.rollout.vllm.command import CPU, Server, check, visible
from lowpeak.rollout.vllm.options import check_options
from lowpeak.rollout.vllm.ports import free_ports
from lowpeak.rollout.vllm.token import TOKEN
from lowpeak.rollout.vllm.versions import require_vllm
from lowpeak.watch.orphans import end_training_with_parent

BESIDE = "LOWPEAK_BESIDE"  # in the environment of a trainer that this module started
URLS = "LOWPEAK_VLLM_URLS"  # in the trainer's environment: the servers that were started for it
FOR_SERVERS = (
    "vllm_tensor_parallel_size",
    "vllm_gpu_memory_utilization",
    "vllm_model_impl",
    "vllm_engine_kwargs",
    "kv_cache_bytes",
)
FOR_SEVERAL = "fsdp2"  # where several devices are to train and nothing says how: it fits where any other does
_OTHERS_SERVERS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def run_beside_servers(kind: str, argv: Sequence[str], given: Mapping[str, Any]) -> int | None:
    """Start servers and trainer and return the trainer's exit status; None where this process is the one to train."""
    if BESIDE in os.environ:
        end_training_with_parent()
        return None
    if given.get("vllm_devices") is None and given.get("train_devices") is None:
        return None
    both = plan(kind, argv, given, num_devices(), os.environ)
    if given.get("dry_run"):
        both = replace(both, servers=())
    elif both.servers:
        require_vllm("--vllm_devices")
    return Supervisor(both, os.environ).run()


def plan(
    kind: str, argv: Sequence[str], given: Mapping[str, Any], num_devices: int, environ: Mapping[str, str]
) -> ServersAndTrainer:
    """What to start for a command, which saw `given`, on a machine with so many devices; ArgumentError before anything loads."""
    if is_rank(environ) or MARK in environ:
        raise ArgumentError(
            "--train_devices and --vllm_devices cannot act in a process that another launcher started: use --accelerate_config, "
            "or `lowpeak serve` with --vllm_server_base_url."
        )
    wanted = _serving_devices(given, num_devices)
    training = _training_devices(given, num_devices, wanted)
    told = {BESIDE: "1"} | visible(training, environ)
    token = given.get("vllm_server_token") or environ.get(TOKEN) or secrets.token_hex(16)
    shares = _shares(wanted, given.get("vllm_tensor_parallel_size", 1))
    ports = free_ports(len(shares))
    servers = tuple(_server(given, share, port, token) for share, port in zip(shares, ports, strict=True))
    for server in servers:
        check(server)
    if servers:
        told |= {URLS: ",".join(server.url for server in servers), TOKEN: token}
    return ServersAndTrainer(
        servers, (sys.executable, "-m", "lowpeak", kind, *argv, *_more(given, training)), told, _logs(given)
    )


def _serving_devices(given: Mapping[str, Any], num_devices: int) -> tuple[str, ...]:
    """The devices that servers get; empty where none are asked for."""
    if given.get("vllm_devices") is None:
        return ()
    _check_given(given)
    wanted = named(given["vllm_devices"], "--vllm_devices")
    check_there(wanted, "--vllm_devices", num_devices)
    return wanted


def _more(given: Mapping[str, Any], training: Sequence[str]) -> tuple[str, ...]:
    """Words for the trainer's command: how the model lies on several devices, where that was not said."""
    said = given.get("accelerate_config") is not None
    return () if said or len(training) < 2 else ("--accelerate_config", FOR_SEVERAL)


def _logs(given: Mapping[str, Any]) -> Path:
    return Path(given.get("output_dir") or "trainer_output")


def handed_over(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """What the trainer is configured with: the servers that were started for it, without what was said to these."""
    if URLS not in environ:
        return dict(given)
    kept = {name: value for name, value in given.items() if name not in FOR_SERVERS}
    return kept | {"vllm_mode": "server", "vllm_server_base_url": environ[URLS]}


def _check_given(given: Mapping[str, Any]) -> None:
    """ArgumentError for what does not go together with servers of the run's own."""
    if not given.get("use_vllm"):
        raise ArgumentError("--vllm_devices has no effect without --use_vllm true; add it, or leave the devices out.")
    if given.get("vllm_mode") == "colocate":
        raise ArgumentError(
            "--vllm_mode colocate runs vLLM on the training devices; leave --vllm_devices or the mode out."
        )
    for name in _OTHERS_SERVERS:
        if name in given:
            raise ArgumentError(
                f"--vllm_devices starts servers, and --{name} names one that runs; leave one of the two out."
            )
    if given.get("vllm_enable_sleep_mode"):
        raise ArgumentError(
            "--vllm_enable_sleep_mode has no effect with --vllm_devices: servers have devices of their own."
        )
    if (given.get("num_machines") or 1) > 1:
        raise ArgumentError(
            "--vllm_devices starts servers for a run on one host; for several, start them with `lowpeak serve` and name all in "
            "--vllm_server_base_url."
        )


def _training_devices(given: Mapping[str, Any], num_devices: int, taken: Sequence[str]) -> tuple[str, ...]:
    """The devices that were named, or those that are not taken: all of them for a run of several processes, else the first.

    Empty on a machine without devices, where it makes no difference.
    """
    several = bool(given.get("accelerate_config"))
    text = given.get("train_devices")
    if text is None:
        if any(each != CPU and not each.isdigit() for each in taken):
            raise ArgumentError(
                "--vllm_devices has GPUs' own names, and which are left to train on is not known by them: name these too, in "
                "--train_devices."
            )
        left = tuple(str(each) for each in range(num_devices) if str(each) not in taken)
        if num_devices and not left:
            raise ArgumentError("--vllm_devices names all devices of this machine, and none is left to train on.")
        return left if several else left[:1]
    devices = named(text, "--train_devices")
    check_there(devices, "--train_devices", num_devices)
    check_apart(devices, taken)
    if given.get("gpu_ids"):
        raise ArgumentError("--train_devices and --gpu_ids say the same; leave --gpu_ids out.")
    return devices


def _shares(devices: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Each server's devices; on CPUs there is one server, of any size."""
    if not devices or tuple(devices) == (CPU,):
        return [(CPU,)] if devices else []
    if size < 1 or len(devices) % size:
        raise ArgumentError(
            f"--vllm_tensor_parallel_size {size} does not divide the {len(devices)} devices of --vllm_devices into servers."
        )
    return [tuple(devices[at : at + size]) for at in range(0, len(devices), size)]


def _server(given: Mapping[str, Any], devices: tuple[str, ...], port: int, token: str) -> Server:
    more = engine_kwargs(given.get("vllm_engine_kwargs"))
    check_options(more, server=True)
    named_by_us = {
        "gpu_memory_utilization": _share(given),
        "max_model_len": given.get("vllm_max_model_length"),
        "model_impl": given.get("vllm_model_impl"),
        "kv_cache_memory_bytes": given.get("kv_cache_bytes"),
        "trust_remote_code": given.get("trust_remote_code") or None,
    }
    return Server(
        model=given.get("model", ""),
        port=port,
        token=token,
        tensor_parallel_size=given.get("vllm_tensor_parallel_size", 1),
        devices=devices,
        dtype=None if "dtype" in more else _dtype(given, devices),
        options=options(
            _adapters(given) | {name: value for name, value in named_by_us.items() if value is not None} | more
        ),
    )


def _share(given: Mapping[str, Any]) -> float | None:
    """A server's share of its device; ArgumentError where its cache has a size already."""
    share: float | None = given.get("vllm_gpu_memory_utilization")
    if given.get("kv_cache_bytes") is None:
        return share
    if share is not None:
        raise ArgumentError(
            f"--vllm_gpu_memory_utilization {share} has no effect: --kv_cache_bytes is the size of the cache; remove either."
        )
    return NO_SHARE


def _adapters(given: Mapping[str, Any]) -> dict[str, Any]:
    """What lets a server put the run's adapter on its base: for one rank, which is who gets to know the adapter's name."""
    if not given.get("use_peft") or given.get("vllm_adapters") is False or given.get("accelerate_config"):
        return {}
    rank = given.get("lora_r", ModelArguments().lora_r)
    return {"enable_lora": True, "max_lora_rank": next((each for each in _LORA_RANKS if each >= rank), rank)}


def options(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings as vLLM's command line has them: switches, JSON for mappings, a list as several words."""
    found: list[str] = []
    for name, value in settings.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif isinstance(value, Mapping):
            found += [f"--{dashed}", json.dumps(value)]
        elif value is not None:
            found += [f"--{dashed}", *(str(each) for each in (value if isinstance(value, list | tuple) else [value]))]
    return tuple(found)


def _dtype(given: Mapping[str, Any], devices: Sequence[str]) -> str | None:
    """The dtype that the trainer computes in, where that can be known without its devices; else the checkpoint's."""
    if given.get("bf16") or given.get("fp16"):
        return "bfloat16" if given.get("bf16") else "float16"
    computes_in_fp32 = given.get("bf16") is False or tuple(devices) == (CPU,)
    return "float32" if computes_in_fp32 else None

"""`--train_devices` and `--vllm_devices`: one command runs vLLM servers and the trainer beside them, each on separate devices.

The trainer is the same command again, in a process that sees the training devices alone and gets the servers' addresses. This
module plans what to start from the command's arguments; `supervisor.py` runs it.
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

from lowpeak.arguments import OWN_SHARE, SERVER_TOKEN, check_cut, engine_kwargs
from lowpeak.cli.arguments import ModelArguments
from lowpeak.cli.devices import read_devices
from lowpeak.cli.launch import MARK, is_rank, num_devices
from lowpeak.cli.supervisor import ServersAndTrainer, supervise
from lowpeak.errors import ArgumentError
from lowpeak.vllm import NO_SHARE, require_vllm
from lowpeak.vllm.serving import CPU, Server, free_ports, visible
from lowpeak.watchdog import end_training_with_parent

BESIDE = "LOWPEAK_BESIDE"  # in the environment of a trainer that this module started
URLS = "LOWPEAK_VLLM_URLS"  # in the trainer's environment: the servers that were started for it
FOR_SERVERS = (
    "vllm_tensor_parallel_size",
    "vllm_gpu_memory_utilization",
    "vllm_model_impl",
    "vllm_engine_kwargs",
    "kv_cache_bytes",
)
FOR_SEVERAL = "fsdp2"  # if several devices train and no config was given: it fits wherever another one does
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def run_beside_servers(kind: str, argv: Sequence[str], given: Mapping[str, Any]) -> int | None:
    """Start servers and trainer and return the trainer's exit status; None if this process is the one to train."""
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
    return supervise(both, os.environ)


def plan(
    kind: str, argv: Sequence[str], given: Mapping[str, Any], num_devices: int, environ: Mapping[str, str]
) -> ServersAndTrainer:
    """Return what to start for a command on a machine with `num_devices`; ArgumentError before anything loads."""
    if is_rank(environ) or MARK in environ:
        raise ArgumentError(
            "--train_devices and --vllm_devices cannot act in a process that another launcher started: use --accelerate_config, "
            "or `lowpeak serve` with --vllm_server_base_url."
        )
    serving: tuple[str, ...] = ()
    if given.get("vllm_devices") is not None:
        _check_given(given)
        serving = read_devices(given["vllm_devices"], "--vllm_devices", num_devices)
    training = _training_devices(given, num_devices, serving)
    token = given.get("vllm_server_token") or environ.get(SERVER_TOKEN) or secrets.token_hex(16)
    shares = _shares(serving, given.get("vllm_tensor_parallel_size", 1))
    ports = free_ports(len(shares))
    servers = tuple(_server(given, share, port, token) for share, port in zip(shares, ports, strict=True))
    added = {BESIDE: "1"} | visible(training, environ)
    if servers:
        added |= {URLS: ",".join(server.url for server in servers), SERVER_TOKEN: token}
    command = [sys.executable, "-m", "lowpeak", kind, *argv]
    if len(training) > 1 and given.get("accelerate_config") is None:
        command += ["--accelerate_config", FOR_SEVERAL]
    return ServersAndTrainer(servers, tuple(command), added, Path(given.get("output_dir") or "trainer_output"))


def handed_over(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the trainer's arguments: with the servers that were started for it, without what was meant for these."""
    if URLS not in environ:
        return dict(given)
    kept = {name: value for name, value in given.items() if name not in FOR_SERVERS}
    return kept | {"vllm_mode": "server", "vllm_server_base_url": environ[URLS]}


def _check_given(given: Mapping[str, Any]) -> None:
    """Raise ArgumentError for arguments that do not go together with --vllm_devices."""
    remedies = {
        "vllm_mode": "it runs vLLM on the training devices: leave one of the two out",
        "vllm_server_base_url": "it names a server that runs: leave one of the two out",
        "vllm_server_host": "it names a server that runs: leave one of the two out",
        "vllm_server_port": "it names a server that runs: leave one of the two out",
        "vllm_enable_sleep_mode": "the servers do not share their devices: leave it out",
        "num_machines": "it starts servers for a run on one host: start them with `lowpeak serve` and name all in "
        "--vllm_server_base_url",
    }
    harmless = {"vllm_mode": ("server", None), "vllm_enable_sleep_mode": (False, None), "num_machines": (1, None)}
    if not given.get("use_vllm"):
        raise ArgumentError("--vllm_devices has no effect without --use_vllm true; add it, or leave the devices out.")
    for name, remedy in remedies.items():
        if name in given and given[name] not in harmless.get(name, ()):
            raise ArgumentError(f"--vllm_devices does not go with --{name} {given[name]}: {remedy}.")


def _training_devices(given: Mapping[str, Any], num_devices: int, serving: Sequence[str]) -> tuple[str, ...]:
    """Return the devices that were named, or those that are left: all of them for a run of several processes, else the first."""
    text = given.get("train_devices")
    if text is None:
        left = _left_devices(num_devices, serving)
        return left if given.get("accelerate_config") else left[:1]
    devices = read_devices(text, "--train_devices", num_devices)
    gpus = [each for each in (*devices, *serving) if each != CPU]
    if len({each.isdigit() for each in gpus}) > 1:
        raise ArgumentError(
            "--train_devices and --vllm_devices name GPUs in two ways: write both lists as indexes, or both as UUIDs."
        )
    if len(set(gpus)) < len(gpus):
        raise ArgumentError(
            f"--train_devices {text} and --vllm_devices {given['vllm_devices']} overlap: give vLLM separate devices, or use "
            "--vllm_mode colocate."
        )
    if given.get("gpu_ids"):
        raise ArgumentError("--train_devices and --gpu_ids say the same; leave --gpu_ids out.")
    return devices


def _left_devices(num_devices: int, serving: Sequence[str]) -> tuple[str, ...]:
    """Return the devices that do not serve; none on a machine without devices, where it makes no difference."""
    if any(each != CPU and not each.isdigit() for each in serving):
        raise ArgumentError(
            "--vllm_devices has GPUs' UUIDs, so the remaining devices cannot be inferred: pass --train_devices too."
        )
    left = tuple(str(each) for each in range(num_devices) if str(each) not in serving)
    if num_devices and not left:
        raise ArgumentError("--vllm_devices names all devices of this machine, and none is left to train on.")
    return left


def _shares(devices: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Return each server's devices; on CPUs there is one server, of any size."""
    if not devices or tuple(devices) == (CPU,):
        return [(CPU,)] if devices else []
    check_cut(size, len(devices), f"the {len(devices)} devices of --vllm_devices")
    return [tuple(devices[at : at + size]) for at in range(0, len(devices), size)]


def _server(given: Mapping[str, Any], devices: tuple[str, ...], port: int, token: str) -> Server:
    more = engine_kwargs(given.get("vllm_engine_kwargs"))
    share, cache = given.get("vllm_gpu_memory_utilization"), given.get("kv_cache_bytes")
    if share is not None and cache is not None:
        raise ArgumentError(
            f"--vllm_gpu_memory_utilization {share} has no effect beside --kv_cache_bytes {cache}: {OWN_SHARE.because}."
        )
    settings = {
        "gpu_memory_utilization": share if cache is None else NO_SHARE,
        "max_model_len": given.get("vllm_max_model_length"),
        "model_impl": given.get("vllm_model_impl"),
        "kv_cache_memory_bytes": cache,
        "trust_remote_code": given.get("trust_remote_code") or None,
    }
    return Server(
        model=given.get("model", ""),
        port=port,
        token=token,
        tensor_parallel_size=given.get("vllm_tensor_parallel_size", 1),
        devices=devices,
        dtype=None if "dtype" in more else _dtype(given, devices),
        options=options(_adapters(given) | settings | more),
    )


def _adapters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what lets a server apply the run's adapter: of one rank, since only the rank that pushes knows the adapter's name."""
    if not given.get("use_peft") or given.get("vllm_adapters") is False or given.get("accelerate_config"):
        return {}
    rank = given.get("lora_r", ModelArguments().lora_r)
    return {"enable_lora": True, "max_lora_rank": next((each for each in _LORA_RANKS if each >= rank), rank)}


def options(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return settings as vLLM's command line has them: switches, JSON for mappings, a list as several words; None is left out."""
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
    """Return the dtype that the trainer computes in if that can be known without its devices, else None: the checkpoint's."""
    if given.get("bf16") or given.get("fp16"):
        return "bfloat16" if given.get("bf16") else "float16"
    computes_in_fp32 = given.get("bf16") is False or tuple(devices) == (CPU,)
    return "float32" if computes_in_fp32 else None

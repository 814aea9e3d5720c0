"""`--train_devices` and `--vllm_devices`: one command runs vLLM servers and a trainer on separate devices.

The trainer is the same command in a second process, which sees only the training devices and receives the servers' URLs. This
module plans the processes from the command's arguments; `supervisor.py` runs them.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lowpeak.arguments import NO_KV_CACHE_BYTES, SERVER_TOKEN, check_tensor_parallel_size, engine_kwargs, parse_bytes
from lowpeak.cli.accelerate_config import DEFAULT_PRESET
from lowpeak.cli.arguments import ModelArguments
from lowpeak.cli.devices import num_devices, read_devices
from lowpeak.cli.launch import LAUNCHED, is_rank, output_folder
from lowpeak.cli.supervisor import ProcessPlan, supervise
from lowpeak.errors import ArgumentError
from lowpeak.vllm import MIN_MEMORY_SHARE, require_vllm
from lowpeak.vllm.serving import CPU, SERVER_URLS, ServerSpec, free_ports, visible_device_variables
from lowpeak.watchdog import exit_training_with_parent

STARTED_WITH_SERVERS = "LOWPEAK_STARTED_WITH_SERVERS"  # set in the environment of a trainer that this module started
SERVER_ARGUMENTS = (
    *("vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_model_impl", "vllm_engine_kwargs"),
    "kv_cache_bytes",
)
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values of vLLM's max_lora_rank


def run_with_servers(kind: str, argv: Sequence[str], given: Mapping[str, Any]) -> int | None:
    """Run servers and trainer and return the trainer's exit status; None if this process is to train."""
    if STARTED_WITH_SERVERS in os.environ:
        exit_training_with_parent()
        return None
    if given.get("vllm_devices") is None and given.get("train_devices") is None:
        return None
    plan = plan_processes(kind, argv, given, num_devices(), os.environ)
    if plan.servers:
        require_vllm("--vllm_devices")
    if given.get("dry_run"):
        plan = replace(plan, servers=())
    return supervise(plan, os.environ)


def _server_token(given: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    return given.get("vllm_server_token") or environ.get(SERVER_TOKEN) or secrets.token_hex(16)


def plan_processes(
    kind: str, argv: Sequence[str], given: Mapping[str, Any], num_devices: int, environ: Mapping[str, str]
) -> ProcessPlan:
    """Return the processes to start for a command on `num_devices`; ArgumentError for arguments that conflict."""
    if is_rank(environ) or LAUNCHED in environ:
        raise ArgumentError(
            "--train_devices and --vllm_devices have no effect in a process that another launcher started: use "
            "--accelerate_config, or `lowpeak serve` with --vllm_server_base_url."
        )
    serving: tuple[str, ...] = ()
    if given.get("vllm_devices") is not None:
        _check_conflicts(given)
        serving = read_devices(given["vllm_devices"], "--vllm_devices", num_devices)
    training = _training_devices(given, num_devices, serving)
    token = _server_token(given, environ)
    shares = _split_devices(serving, given.get("vllm_tensor_parallel_size", 1))
    ports = free_ports(len(shares))
    servers = tuple(_server(given, share, port, token) for share, port in zip(shares, ports, strict=True))
    added = {STARTED_WITH_SERVERS: "1"} | visible_device_variables(training, environ)
    if servers:
        added |= {SERVER_URLS: ",".join(server.url for server in servers), SERVER_TOKEN: token}
    command = [sys.executable, "-m", "lowpeak", kind, *argv]
    if len(training) > 1 and given.get("accelerate_config") is None:
        command += ["--accelerate_config", DEFAULT_PRESET]
    return ProcessPlan(servers, tuple(command), added, output_folder(given))


def trainer_settings(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the trainer's arguments: the URLs of its servers in place of the arguments that configure servers."""
    if SERVER_URLS not in environ:
        return dict(given)
    kept = {name: value for name, value in given.items() if name not in SERVER_ARGUMENTS}
    return kept | {"vllm_mode": "server", "vllm_server_base_url": environ[SERVER_URLS]}


def _check_conflicts(given: Mapping[str, Any]) -> None:
    """Raise ArgumentError for arguments that conflict with --vllm_devices."""
    remedies = {
        "vllm_mode": "it runs vLLM on the training devices: remove one of the two",
        "vllm_server_base_url": "it names a running server: remove one of the two",
        "vllm_server_host": "it names a running server: remove one of the two",
        "vllm_server_port": "it names a running server: remove one of the two",
        "vllm_enable_sleep_mode": "the servers do not share their devices: remove it",
        "num_machines": "servers are started for a run on one host: start them with `lowpeak serve` and list them in "
        "--vllm_server_base_url",
    }
    harmless = {"vllm_mode": ("server", None), "vllm_enable_sleep_mode": (False, None), "num_machines": (1, None)}
    if not given.get("use_vllm"):
        raise ArgumentError("--vllm_devices has no effect without --use_vllm true; add it, or remove --vllm_devices.")
    for name, remedy in remedies.items():
        if name in given and given[name] not in harmless.get(name, ()):
            raise ArgumentError(f"--vllm_devices conflicts with --{name} {given[name]}: {remedy}.")


def _training_devices(given: Mapping[str, Any], num_devices: int, serving: Sequence[str]) -> tuple[str, ...]:
    """Return the devices of --train_devices, else the remaining ones: all with --accelerate_config, or the first."""
    text = given.get("train_devices")
    if text is None:
        remaining = _remaining_devices(num_devices, serving)
        return remaining if given.get("accelerate_config") else remaining[:1]
    devices = read_devices(text, "--train_devices", num_devices)
    gpus = [each for each in (*devices, *serving) if each != CPU]
    if len({each.isdigit() for each in gpus}) > 1:
        raise ArgumentError(
            "--train_devices and --vllm_devices mix indexes and UUIDs: write both lists as indexes, or both as UUIDs."
        )
    if len(set(gpus)) < len(gpus):
        raise ArgumentError(
            f"--train_devices {text} and --vllm_devices {given['vllm_devices']} overlap: give vLLM separate devices, or use "
            "--vllm_mode colocate."
        )
    if given.get("gpu_ids"):
        raise ArgumentError("--train_devices and --gpu_ids set the same devices; remove --gpu_ids.")
    return devices


def _remaining_devices(num_devices: int, serving: Sequence[str]) -> tuple[str, ...]:
    """Return the devices that do not serve; none on a machine without accelerators."""
    if any(each != CPU and not each.isdigit() for each in serving):
        raise ArgumentError(
            "--vllm_devices has GPUs' UUIDs, so the remaining devices cannot be inferred: pass --train_devices too."
        )
    remaining = tuple(str(each) for each in range(num_devices) if str(each) not in serving)
    if num_devices and not remaining:
        raise ArgumentError(
            "--vllm_devices names all devices of this machine, so none remains to train on; name fewer."
        )
    return remaining


def _split_devices(devices: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Return the devices of each server; on CPUs there is one server for any `size`."""
    if not devices or tuple(devices) == (CPU,):
        return [(CPU,)] if devices else []
    check_tensor_parallel_size(size, len(devices), f"the {len(devices)} devices of --vllm_devices")
    return [tuple(devices[at : at + size]) for at in range(0, len(devices), size)]


def add_server_urls(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as the trainer of --vllm_devices gets them, with a URL for each server."""
    if given.get("vllm_devices") is None:
        return dict(given)
    devices = read_devices(given["vllm_devices"], "--vllm_devices")
    num_servers = len(_split_devices(devices, given.get("vllm_tensor_parallel_size", 1)))
    urls = ",".join(f"http://127.0.0.1:{8000 + index}" for index in range(num_servers))
    return trainer_settings(given, {SERVER_URLS: urls})


def _server(given: Mapping[str, Any], devices: tuple[str, ...], port: int, token: str) -> ServerSpec:
    more = engine_kwargs(given.get("vllm_engine_kwargs"))
    share, cache = given.get("vllm_gpu_memory_utilization"), given.get("kv_cache_bytes")
    if share is not None and cache is not None:
        raise ArgumentError(
            f"--vllm_gpu_memory_utilization {share} has no effect beside --kv_cache_bytes {cache}: {NO_KV_CACHE_BYTES.reason}."
        )
    settings = {
        "gpu_memory_utilization": share if cache is None else MIN_MEMORY_SHARE,
        "max_model_len": given.get("vllm_max_model_length"),
        "model_impl": given.get("vllm_model_impl"),
        "kv_cache_memory_bytes": None if cache is None else parse_bytes(cache) or cache,
        "trust_remote_code": given.get("trust_remote_code") or None,
    }
    return ServerSpec(
        model=given.get("model", ""),
        port=port,
        token=token,
        tensor_parallel_size=given.get("vllm_tensor_parallel_size", 1),
        devices=devices,
        dtype=None if "dtype" in more else _dtype(given, devices),
        options=as_options(_lora_options(given) | settings | more),
    )


def _lora_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vLLM options that let a server apply the run's LoRA adapter, in all versions of rollouts ahead."""
    if not given.get("use_peft") or given.get("vllm_adapters") is False:
        return {}
    rank, staleness = given.get("lora_r", ModelArguments().lora_r), given.get("max_staleness") or 0
    options = {"enable_lora": True, "max_lora_rank": next((each for each in _LORA_RANKS if each >= rank), rank)}
    return options | ({"max_loras": staleness + 1} if staleness else {})


def as_options(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return settings as options of vLLM's command line: switches, JSON for mappings, several words for lists; omit None."""
    words: list[str] = []
    for name, value in settings.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif isinstance(value, Mapping):
            words += [f"--{dashed}", json.dumps(value)]
        elif value is not None:
            words += [f"--{dashed}", *(str(each) for each in (value if isinstance(value, list | tuple) else [value]))]
    return tuple(words)


def _dtype(given: Mapping[str, Any], devices: Sequence[str]) -> str | None:
    """Return the trainer's compute dtype if it is known without its devices, else None: the checkpoint's dtype."""
    if given.get("bf16") or given.get("fp16"):
        return "bfloat16" if given.get("bf16") else "float16"
    computes_in_fp32 = given.get("bf16") is False or tuple(devices) == (CPU,)
    return "float32" if computes_in_fp32 else None

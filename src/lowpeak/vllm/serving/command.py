"""Command line and environment of a vLLM server."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowpeak.arguments import SERVER_TOKEN, server_url
from lowpeak.errors import ArgumentError
from lowpeak.vllm.engine_args import COMMON_ENGINE_ARGS
from lowpeak.vllm.serving.entrypoint import SCALE_OUT
from lowpeak.vllm.serving.token_route import SERVES_TOKENS
from lowpeak.watchdog import PARENT_VARIABLE

LOOPBACK = "127.0.0.1"
SERVER_URLS = "LOWPEAK_VLLM_URLS"  # in the environment of a trainer whose command started the servers
CPU = "cpu"
_CPU_CACHE_BYTES = 1 << 30
_ADAPTER_MIDDLEWARE = "lowpeak.vllm.serving.middleware.AdapterMiddleware"
_TOKEN_ROUTE = "lowpeak.vllm.serving.token_route.TokenRoute"
_TOKEN_MIDDLEWARE = "lowpeak.vllm.serving.middleware.TokenMiddleware"
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAST_PORT = 65535
_RESERVED = ("worker-extension-cls", "api-key", "uds")


@dataclass(frozen=True)
class ServerSpec:
    """Specification of a server.

    `devices` are visible to it (empty: all, `("cpu",)`: none), `options` are vLLM's, as the user wrote them.
    """

    model: str
    host: str = LOOPBACK
    port: int = 8000
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    tensor_parallel_size: int = 1
    devices: tuple[str, ...] = ()
    dtype: str | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.model:
            raise ArgumentError("a server needs --model, the folder or hub name of the model that is trained.")
        if not 1 <= self.port <= _LAST_PORT:
            raise ArgumentError(f"--port {self.port} is not a port; use one from 1 to {_LAST_PORT}.")
        if self.tensor_parallel_size < 1:
            raise ArgumentError(f"the tensor parallel size {self.tensor_parallel_size} must be at least 1.")
        for option in _RESERVED:
            if _has(self.options, option):
                raise ArgumentError(f"--{option} is set by lowpeak; remove it (for a token use --token).")
        if 1 < len(self.devices) < self.tensor_parallel_size:
            raise ArgumentError(
                f"--tensor_parallel_size {self.tensor_parallel_size} needs as many devices, but {len(self.devices)} were given."
            )

    @property
    def url(self) -> str:
        """Return the address for a client on this host."""
        return server_url(self.host, self.port)


def server_command(server: ServerSpec) -> list[str]:
    """Return the server's command; the user's options replace the defaults."""
    defaults: dict[str, str | None] = {
        "model": server.model,
        "host": server.host,
        "port": str(server.port),
        "tensor-parallel-size": str(server.tensor_parallel_size),
        **{name.replace("_", "-"): value for name, value in COMMON_ENGINE_ARGS.items()},
        "enable-prefix-caching": None,
        SCALE_OUT.removeprefix("--"): None,
    }
    if server.dtype is not None:
        defaults["dtype"] = server.dtype
    # On a CPU vLLM's share would be nine tenths of the host's memory.
    if server.devices == (CPU,) and not _has(server.options, "gpu-memory-utilization"):
        defaults["kv-cache-memory-bytes"] = str(_CPU_CACHE_BYTES)
    added: list[str] = []
    for name, value in defaults.items():
        if not _has(server.options, name):
            added += [f"--{name}"] if value is None else [f"--{name}", value]
    # Requests pass the last middleware first.
    routes = ["--middleware", _ADAPTER_MIDDLEWARE, "--middleware", _TOKEN_ROUTE]
    middleware = [*routes, *server.options, "--middleware", _TOKEN_MIDDLEWARE]
    return [sys.executable, "-m", "lowpeak.vllm.serving.entrypoint", *added, *middleware]


def server_environment(server: ServerSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: its devices, the switch of the weight-update routes, the id of its parent
    process.
    """
    # On a CPU, vLLM's default binds each server's threads to the first cores, and an assertion fails with two workers.
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **inherited}
    # The token replaces vLLM's key, which protects fewer routes.
    for name in (*_RANK_VARIABLES, "VLLM_API_KEY"):
        variables.pop(name, None)
    variables |= {"VLLM_SERVER_DEV_MODE": "1", SERVES_TOKENS: "1"}
    variables |= {PARENT_VARIABLE: str(os.getpid()), SERVER_TOKEN: server.token}
    return variables | visible_device_variables(server.devices, inherited)


def visible_device_variables(devices: Sequence[str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make only these devices visible to a process (none: no change).

    Indices count the devices that are visible here.
    """
    if not devices:
        return {}
    if tuple(devices) == (CPU,):
        return {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    names = [each.strip() for each in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    visible = {str(index): name for index, name in enumerate(names)}
    if visible and any(each.isdigit() and each not in visible for each in devices):
        raise ArgumentError(
            f"the devices {', '.join(devices)} are not all visible: CUDA_VISIBLE_DEVICES has {len(visible)}."
        )
    value = ",".join(visible.get(each, each) for each in devices)
    return {"CUDA_VISIBLE_DEVICES": value, **dict.fromkeys({"HIP_VISIBLE_DEVICES"} & inherited.keys(), value)}


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return different ports that are free now at the address `host` (empty: at all addresses of this machine)."""
    probes = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _has(options: Sequence[str], name: str) -> bool:
    """Return whether the user wrote `--name`, `--no-name` or `--name=...`, with dashes or underscores."""
    written = {option.split("=")[0].replace("_", "-") for option in options if option.startswith("--")}
    return f"--{name}" in written or f"--no-{name}" in written

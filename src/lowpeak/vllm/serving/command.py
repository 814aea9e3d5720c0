"""The command line and the environment of one vLLM server: vLLM's own, and what weight updates need."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowpeak.arguments import SERVER_TOKEN, url_of
from lowpeak.errors import ArgumentError
from lowpeak.vllm.engine_args import COMMON_ENGINE_ARGS
from lowpeak.vllm.serving.entrypoint import SCALE_OUT
from lowpeak.watchdog import PARENT

LOOPBACK = "127.0.0.1"
CPU = "cpu"
_CPU_CACHE = 1 << 30
_ADAPTERS = "lowpeak.vllm.serving.middleware.AdapterMiddleware"
_GUARD = "lowpeak.vllm.serving.middleware.TokenMiddleware"
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAST_PORT = 65535
_TAKEN = ("worker-extension-cls", "api-key", "uds")


@dataclass(frozen=True)
class Server:
    """A server to start: `devices` are those that it sees (empty: all, `("cpu",)`: none), `options` are vLLM's, as written."""

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
            raise ArgumentError(f"--port {self.port} is no port; use one from 1 to {_LAST_PORT}.")
        if self.tensor_parallel_size < 1:
            raise ArgumentError(f"the tensor parallel size {self.tensor_parallel_size} must be at least 1.")
        for option in _TAKEN:
            if _has(self.options, option):
                raise ArgumentError(f"--{option} is lowpeak's own to set; leave it out (a token is --token).")
        if 1 < len(self.devices) < self.tensor_parallel_size:
            raise ArgumentError(
                f"--tensor_parallel_size {self.tensor_parallel_size} needs as many devices, and {len(self.devices)} were named."
            )

    @property
    def url(self) -> str:
        """The address for a client on this host."""
        return url_of(self.host, self.port)


def words(server: Server) -> list[str]:
    """Return the command; an option that the user wrote replaces ours.

    Log-probs are of the full softmax, the cache serves a group's prompt once, and a request alone says how it is sampled: defaults
    that a checkpoint brings along are off. On a CPU, where vLLM's share is nine tenths of all the host's memory, the KV cache is
    bounded unless the user sets either.
    """
    ours: dict[str, str | None] = {
        "model": server.model,
        "host": server.host,
        "port": str(server.port),
        "tensor-parallel-size": str(server.tensor_parallel_size),
        **{name.replace("_", "-"): value for name, value in COMMON_ENGINE_ARGS.items()},
        "enable-prefix-caching": None,
        SCALE_OUT.removeprefix("--"): None,
    }
    if server.dtype is not None:
        ours["dtype"] = server.dtype
    if server.devices == (CPU,) and not _has(server.options, "gpu-memory-utilization"):
        ours["kv-cache-memory-bytes"] = str(_CPU_CACHE)
    added: list[str] = []
    for name, value in ours.items():
        if not _has(server.options, name):
            added += [f"--{name}"] if value is None else [f"--{name}", value]
    # The last middleware stands before all others.
    middleware = ["--middleware", _ADAPTERS, *server.options, "--middleware", _GUARD]
    return [sys.executable, "-m", "lowpeak.vllm.serving.entrypoint", *added, *middleware]


def environment(server: Server, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: its devices, the routes that weight updates need, the process that started it.

    On a CPU, vLLM's default binds each server's threads to the first cores and asserts on two workers: it is off unless set.
    """
    found = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **inherited}
    for name in (*_RANKS, "VLLM_API_KEY"):  # vLLM's own key guards less than the token does
        found.pop(name, None)
    found |= {"VLLM_SERVER_DEV_MODE": "1", PARENT: str(os.getpid()), SERVER_TOKEN: server.token}
    return found | visible(server.devices, inherited)


def visible(devices: Sequence[str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that show a process these devices alone (none: no change); indexes count those visible here."""
    if not devices:
        return {}
    if tuple(devices) == (CPU,):
        return {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    here = [each.strip() for each in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    if here and any(each.isdigit() and int(each) >= len(here) for each in devices):
        raise ArgumentError(
            f"the devices {', '.join(devices)} are not all there: CUDA_VISIBLE_DEVICES shows {len(here)} here."
        )
    shown = ",".join(here[int(each)] if here and each.isdigit() else each for each in devices)
    variables = ["CUDA_VISIBLE_DEVICES", *(["HIP_VISIBLE_DEVICES"] if "HIP_VISIBLE_DEVICES" in inherited else [])]
    return dict.fromkeys(variables, shown)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return different ports that are free now at the address `host` (empty: at all of this machine's)."""
    probes = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _has(options: Sequence[str], name: str) -> bool:
    """Return whether the user wrote `--name`, `--no-name` or `--name=...`, with dashes or underscores."""
    written = {option.split("=")[0].replace("_", "-") for option in options if option.startswith("--")}
    return f"--{name}" in written or f"--no-{name}" in written

"""The command line and the environment of one vLLM server: vLLM's own, and what weight updates need."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowpeak.errors import ArgumentError
from lowpeak.rollout.vllm.build import ALWAYS
from lowpeak.rollout.vllm.launched import SCALE_OUT
from lowpeak.rollout.vllm.token import TOKEN
from lowpeak.watch.orphans import PARENT

LOOPBACK = "127.0.0.1"
CPU = "cpu"
_CPU_CACHE = 1 << 30
_ADAPTERS = "lowpeak.rollout.vllm.adapter_route.AdapterMiddleware"
_GUARD = "lowpeak.rollout.vllm.token.TokenMiddleware"
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAST_PORT = 65535
_TAKEN = ("worker-extension-cls", "api-key", "uds")


@dataclass(frozen=True)
class Server:
    """One server to be: `devices` are those that it sees (empty: all, `("cpu",)`: none), `options` are vLLM's, as written."""

    model: str
    host: str = LOOPBACK
    port: int = 8000
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    tensor_parallel_size: int = 1
    devices: tuple[str, ...] = ()
    dtype: str | None = None
    options: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where a client on this host finds it."""
        host = LOOPBACK if self.host in ("", "0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def check(server: Server) -> None:
    """ArgumentError for a server that cannot be, or whose options are ours to set."""
    if not server.model:
        raise ArgumentError("a server needs --model, the folder or hub name of the model that is trained.")
    if not 1 <= server.port <= _LAST_PORT:
        raise ArgumentError(f"--port {server.port} is no port; use one from 1 to {_LAST_PORT}.")
    if server.tensor_parallel_size < 1:
        raise ArgumentError(f"the tensor parallel size {server.tensor_parallel_size} must be at least 1.")
    for option in _TAKEN:
        if _has(server.options, option):
            raise ArgumentError(f"--{option} is lowpeak's own to set; leave it out (a token is --token).")
    if len(server.devices) > 1 and len(server.devices) < server.tensor_parallel_size:
        raise ArgumentError(
            f"--tensor_parallel_size {server.tensor_parallel_size} needs as many devices, and {len(server.devices)} were named."
        )


def words(server: Server) -> list[str]:
    """The command; where an option of ours was written by the user, the user's stands.

    Log-probs are of the full softmax, the cache serves a group's prompt once, and a request alone says how it is sampled: defaults
    that a checkpoint brings along are off. On a CPU, where vLLM's share is nine tenths of all the host's memory, the KV cache is
    bounded unless the user says either.
    """
    ours = {
        "model": server.model,
        "host": server.host,
        "port": str(server.port),
        "tensor-parallel-size": str(server.tensor_parallel_size),
        **{name.replace("_", "-"): value for name, value in ALWAYS.items()},
    }
    if server.dtype is not None:
        ours["dtype"] = server.dtype
    if server.devices == (CPU,) and not _has(server.options, "gpu-memory-utilization"):
        ours["kv-cache-memory-bytes"] = str(_CPU_CACHE)
    said = [word for name, value in ours.items() if not _has(server.options, name) for word in (f"--{name}", value)]
    flags = ["--enable-prefix-caching"] if not _has(server.options, "enable-prefix-caching") else []
    flags += [SCALE_OUT] if not _has(server.options, SCALE_OUT[2:]) else []
    flags += ["--middleware", _ADAPTERS]
    guard = ["--middleware", _GUARD]  # the last one stands before all others
    return [sys.executable, "-m", "lowpeak.rollout.vllm.launched", *said, *flags, *server.options, *guard]


def environment(server: Server, inherited: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: its devices, the routes that weight updates need, who started it.

    On a CPU, vLLM's default binds each server's threads to the first cores and asserts on two workers: it is off unless set.
    """
    found = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **inherited}
    for name in (*_RANKS, "VLLM_API_KEY"):  # vLLM's own key guards less than the token does
        found.pop(name, None)
    found |= {"VLLM_SERVER_DEV_MODE": "1", PARENT: str(os.getpid()), TOKEN: server.token}
    return found | visible(server.devices, inherited)


def visible(devices: Sequence[str], inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that show a process these devices and no others; indexes count those that are visible here.

    Of no devices: nothing is changed.
    """
    if not devices:
        return {}
    if tuple(devices) == (CPU,):
        return {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    shown = ",".join(_counted_from(inherited.get("CUDA_VISIBLE_DEVICES", ""), devices))
    variables = ["CUDA_VISIBLE_DEVICES", *(["HIP_VISIBLE_DEVICES"] if "HIP_VISIBLE_DEVICES" in inherited else [])]
    return dict.fromkeys(variables, shown)


def _counted_from(visible_here: str, devices: Sequence[str]) -> list[str]:
    """The devices by the names that `CUDA_VISIBLE_DEVICES` has for their indexes here, where it has any."""
    here = [each.strip() for each in visible_here.split(",") if each.strip()]
    if here and any(each.isdigit() and int(each) >= len(here) for each in devices):
        raise ArgumentError(
            f"the devices {', '.join(devices)} are not all there: CUDA_VISIBLE_DEVICES shows {len(here)} here."
        )
    return [here[int(each)] if here and each.isdigit() else each for each in devices]


def _has(options: Sequence[str], name: str) -> bool:
    """Whether the user wrote `--name`, `--no-name` or `--name=...`, with dashes or underscores."""
    written = {option.split("=")[0].replace("_", "-") for option in options if option.startswith("--")}
    return f"--{name}" in written or f"--no-{name}" in written

"""Selection of the transport that reaches all workers of an update, and construction of its two ends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowpeak.arguments import Transport
from lowpeak.errors import EngineError
from lowpeak.vllm.protocol import Vllm, call_workers
from lowpeak.vllm.weight_sync.transports.base import BucketReceiver, BucketSender, ProcessReceiver, ProcessSender
from lowpeak.vllm.weight_sync.transports.nccl import NcclReceiver, NcclSender
from lowpeak.vllm.weight_sync.transports.tcp import TcpReceiver, TcpSender, host_addresses


def open_sender(
    transport: Transport,
    vllms: Sequence[Vllm],
    bucket_bytes: int,
    device: torch.device,
    timeout: float,
    port: int | None = None,
) -> BucketSender:
    """Return the trainer's end of `transport`; raise EngineError if it cannot reach the workers.

    "auto" selects the process if the engine is in it, NCCL if trainer and workers have different GPUs, otherwise TCP.
    NCCL and TCP listen at `port` of this host (None: any free one).
    """
    in_process = all(vllm.in_process for vllm in vllms)
    if transport == "process" or (transport == "auto" and in_process):
        return ProcessSender(bucket_bytes, device=None)
    workers = _WorkerLocations.of(vllms, timeout)
    if transport == "tcp" or (transport == "auto" and not workers.on_other_gpus(device)):
        return TcpSender(bucket_bytes, loopback=workers.all_local, timeout=timeout, port=port)
    if device.type != "cuda" or "cpu" in workers.devices:
        raise EngineError("vllm_transport='nccl' needs GPUs, but the trainer or vLLM is on a CPU: use 'auto'.")
    host = "127.0.0.1" if workers.all_local else host_addresses()[0]
    return NcclSender(bucket_bytes, device, host, workers.num_workers, timeout, port)


def available_transports(vllms: Sequence[Vllm], device: torch.device, timeout: float) -> list[Transport]:
    """Return every transport by which values on `device` can reach all workers."""
    transports: list[Transport] = ["process"] if all(vllm.in_process for vllm in vllms) else []
    transports.append("tcp")
    return [*transports, "nccl"] if _WorkerLocations.of(vllms, timeout).on_other_gpus(device) else transports


def open_receiver(invitation: Mapping[str, Any], device: torch.device, rank: int) -> BucketReceiver:
    """Return a worker's end for the trainer's invitation; `rank` is the worker's within its engine."""
    arguments = dict(invitation)
    transport, first_rank = arguments.pop("transport"), arguments.pop("first_rank")
    if transport == "nccl":
        return NcclReceiver(**arguments, rank=first_rank + rank, device=device)
    return ProcessReceiver() if transport == "process" else TcpReceiver(**arguments)


@dataclass(frozen=True)
class _WorkerLocations:
    """Locations of the workers: whether all are on this host, their devices, and their number."""

    all_local: bool
    devices: frozenset[str]
    num_workers: int

    @staticmethod
    def of(vllms: Sequence[Vllm], timeout: float) -> _WorkerLocations:
        engines = call_workers(vllms, "lowpeak_look", [{}] * len(vllms), timeout)
        workers = [worker for engine in engines for worker in engine]
        network = _network()
        all_local = network is not None and all(worker["network"] == network for worker in workers)
        return _WorkerLocations(all_local, frozenset(worker["device"] for worker in workers), len(workers))

    def on_other_gpus(self, device: torch.device) -> bool:
        """Return whether NCCL can reach the workers: it refuses two ranks on one device."""
        return device.type == "cuda" and "cpu" not in self.devices and _device_id(device) not in self.devices


def probe_location(device: torch.device) -> dict[str, Any]:
    """Return a worker's network and device, as names that are equal in all processes of its host."""
    return {"network": _network(), "device": _device_id(device)}


def _network() -> str | None:
    """Return a name of this process's network; processes with the same name share the loopback address."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return None


def _device_id(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type

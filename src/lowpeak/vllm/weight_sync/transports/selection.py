"""Which transport reaches all workers of all engines of an update, and its two ends."""

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
    """The trainer's end of `transport`, of the one that fits best with "auto"; EngineError where it reaches no worker.

    "auto" is the process if the engine is in it, NCCL if trainer and workers have GPUs of their own, else TCP. NCCL and TCP meet at
    `port` of this host (None: any free one).
    """
    in_process = all(vllm.in_process for vllm in vllms)
    if transport == "process" or (transport == "auto" and in_process):
        return ProcessSender(bucket_bytes, device=None)
    seen = _WorkerLocations.of(vllms, timeout)
    if transport == "tcp" or (transport == "auto" and not seen.on_other_gpus(device)):
        return TcpSender(bucket_bytes, loopback=seen.all_here, timeout=timeout, port=port)
    if device.type != "cuda" or "cpu" in seen.devices:
        raise EngineError("vllm_transport='nccl' is between GPUs, and the trainer or vLLM is on a CPU: use 'auto'.")
    host = "127.0.0.1" if seen.all_here else host_addresses()[0]
    return NcclSender(bucket_bytes, device, host, seen.num_workers, timeout, port)


def reaching(vllms: Sequence[Vllm], device: torch.device, timeout: float) -> list[Transport]:
    """Every transport by which values on `device` can reach all workers."""
    reached: list[Transport] = ["process"] if all(vllm.in_process for vllm in vllms) else []
    reached.append("tcp")
    return [*reached, "nccl"] if _WorkerLocations.of(vllms, timeout).on_other_gpus(device) else reached


def open_receiver(invitation: Mapping[str, Any], device: torch.device, rank: int) -> BucketReceiver:
    """A worker's end of what the trainer offers; `rank` is the worker's among its engine's."""
    given = dict(invitation)
    transport, first_rank = given.pop("transport"), given.pop("first_rank")
    if transport == "nccl":
        return NcclReceiver(**given, rank=first_rank + rank, device=device)
    return ProcessReceiver() if transport == "process" else TcpReceiver(**given)


@dataclass(frozen=True)
class _WorkerLocations:
    """What the workers answer: whether all are on this host, and their devices."""

    all_here: bool
    devices: frozenset[str]
    num_workers: int

    @staticmethod
    def of(vllms: Sequence[Vllm], timeout: float) -> _WorkerLocations:
        answers = [a for each in call_workers(vllms, "lowpeak_look", [{}] * len(vllms), timeout) for a in each]
        here = _network()
        all_here = here is not None and all(answer["network"] == here for answer in answers)
        return _WorkerLocations(all_here, frozenset(answer["device"] for answer in answers), len(answers))

    def on_other_gpus(self, device: torch.device) -> bool:
        """Return whether NCCL reaches them: it refuses two ranks on one device."""
        return device.type == "cuda" and "cpu" not in self.devices and _device_id(device) not in self.devices


def probe_location(device: torch.device) -> dict[str, Any]:
    """Return a worker's network and device, by names that are the same in every process of its host."""
    return {"network": _network(), "device": _device_id(device)}


def _network() -> str | None:
    """Return a name of this process's network: processes of the same one share the loopback address."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return None


def _device_id(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type

"""Which transport reaches all workers of all engines of an update, and its two ends."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lowpeak.config.vllm import Transport
from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.vllm import Vllm, ask
from lowpeak.rollout.vllm.weights.transports.ipc import IpcInlet, IpcSender
from lowpeak.rollout.vllm.weights.transports.nccl import NcclInlet, NcclSender
from lowpeak.rollout.vllm.weights.transports.process import ProcessInlet, ProcessSender
from lowpeak.rollout.vllm.weights.transports.shm import ShmInlet, ShmSender, is_ours, new_name, shared_folder, sweep
from lowpeak.rollout.vllm.weights.transports.tcp import TcpInlet, TcpSender, own_addresses
from lowpeak.rollout.vllm.weights.transports.transport import Inlet, Sender


def open_sender(
    transport: Transport,
    vllms: Sequence[Vllm],
    bucket_bytes: int,
    device: torch.device,
    timeout: float,
    port: int | None = None,
) -> Sender:
    """The trainer's end of `transport`, of the one that fits best with "auto"; EngineError where it reaches no worker.

    "auto" is the process where the engine is in it; on CUDA IPC where all workers are on the trainer's device, else NCCL; on
    CPUs shared memory where they are on its host, else TCP. NCCL and TCP meet at `port` of this host (None: any free one).
    """
    if transport == "process" or (transport == "auto" and all(vllm.workers.in_process for vllm in vllms)):
        _check_in_process(vllms)
        return ProcessSender(bucket_bytes)
    seen = _Seen.of(vllms, timeout)
    chosen = seen.best(device) if transport == "auto" else transport
    seen.check(chosen, device)
    try:
        return _sender(chosen, seen, bucket_bytes, device, timeout, port)
    except EngineError:
        if transport != "auto" or chosen != "shm":
            raise
        return _sender(
            "tcp", seen, bucket_bytes, device, timeout, port
        )  # shared memory is full, or a container's few megabytes


def _sender(
    chosen: Transport, seen: _Seen, bucket_bytes: int, device: torch.device, timeout: float, port: int | None
) -> Sender:
    """The trainer's end of a transport between processes."""
    makers: Mapping[str, Callable[[], Sender]] = {
        "shm": lambda: ShmSender(bucket_bytes),
        "tcp": lambda: TcpSender(bucket_bytes, loopback=seen.all_here, timeout=timeout, port=port),
        "ipc": lambda: IpcSender(bucket_bytes, device),
        "nccl": lambda: NcclSender(bucket_bytes, device, seen.meeting_host(), seen.num_workers, timeout, port),
    }
    return makers[chosen]()


def reaching(vllms: Sequence[Vllm], device: torch.device, timeout: float) -> list[Transport]:
    """Every transport by which values on `device` can reach all workers."""
    in_process = [vllm.workers.in_process for vllm in vllms]
    seen = _Seen.of(vllms, timeout)
    on_cuda = device.type == "cuda" and "cpu" not in seen.devices
    is_same = on_cuda and seen.devices == {device_id(device)}
    reaches: dict[Transport, bool] = {
        "process": all(in_process),
        "shm": seen.all_here,
        "tcp": True,
        "ipc": is_same and seen.all_here and not any(in_process),  # a process cannot open its own memory's handle
        "nccl": on_cuda and device_id(device) not in seen.devices,  # which refuses two ranks on one device
    }
    return [transport for transport, does in reaches.items() if does]


def open_inlet(invitation: Mapping[str, Any], device: torch.device, rank: int) -> Inlet:
    """A worker's end of what the trainer offers; `rank` is the worker's among its engine's."""
    given = dict(invitation)
    transport, first_rank = given.pop("transport"), given.pop("first_rank")
    makers: Mapping[str, Callable[[], Inlet]] = {
        "process": ProcessInlet,
        "shm": lambda: ShmInlet(**given),
        "tcp": lambda: TcpInlet(**given),
        "ipc": lambda: IpcInlet(**given, device=device),
        "nccl": lambda: NcclInlet(**given, rank=first_rank + rank, device=device),
    }
    return makers[transport]()


class _Seen:
    """What the workers told: their devices, and whether they see a file that this process wrote."""

    def __init__(self, all_here: bool, devices: frozenset[str], num_workers: int) -> None:
        self.all_here = all_here
        self.devices = devices
        self.num_workers = num_workers

    @staticmethod
    def of(vllms: Sequence[Vllm], timeout: float) -> _Seen:
        folder = shared_folder()
        sweep(folder)
        path, secret = folder / new_name(), secrets.token_hex(16)
        try:
            path.write_text(secret)
            answers = [
                a for each in ask(vllms, "lowpeak_look", [{"path": str(path)}] * len(vllms), timeout) for a in each
            ]
        finally:
            path.unlink(missing_ok=True)
        here = all(answer["content"] == secret for answer in answers)
        return _Seen(here, frozenset(answer["device"] for answer in answers), len(answers))

    def check(self, chosen: Transport, device: torch.device) -> None:
        """EngineError where the transport that was asked for does not reach these workers from the device."""
        if chosen == "shm" and not self.all_here:
            raise EngineError("vllm_transport='shm': vLLM runs on another host, or has other shared memory: use 'tcp'.")
        if chosen in ("ipc", "nccl") and (device.type != "cuda" or "cpu" in self.devices):
            raise EngineError(
                f"vllm_transport={chosen!r} is between GPUs, and the trainer or vLLM is on a CPU: use 'auto'."
            )

    def meeting_host(self) -> str:
        """This host's address, as the workers reach it."""
        return "127.0.0.1" if self.all_here else own_addresses()[0]

    def best(self, device: torch.device) -> Transport:
        if device.type != "cuda" or "cpu" in self.devices:
            return "shm" if self.all_here else "tcp"
        return "ipc" if self.all_here and self.devices == {device_id(device)} else "nccl"


def device_id(device: torch.device) -> str:
    """A name of the device that is the same in every process of the host: a GPU's UUID."""
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)


def look(path: str, device: torch.device) -> dict[str, Any]:
    """A worker's answer: what is in the file, where it is one that a trainer made to be seen, and its device."""
    content = ""
    with contextlib.suppress(OSError, ValueError):
        content = Path(path).read_text() if is_ours(Path(path)) else ""
    return {"content": content, "device": device_id(device)}


def _check_in_process(vllms: Sequence[Vllm]) -> None:
    if not all(vllm.workers.in_process for vllm in vllms):
        raise EngineError("vllm_transport='process': vLLM runs in other processes; use 'auto'.")

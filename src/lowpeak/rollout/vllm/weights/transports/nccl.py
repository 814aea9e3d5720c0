"""Workers on other devices: the trainer broadcasts each bucket to all of them over NCCL.

The group is vLLM's `StatelessProcessGroup` with its `PyNcclCommunicator`, which its own weight transfer is made of: it stands
beside the trainer's process groups and ends with the update. The trainer is rank 0, the workers of all engines follow.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.weights.buckets import Bucket
from lowpeak.rollout.vllm.weights.transports.transport import Ask


class NcclSender:
    """The trainer's end; forming the group and each bucket may take `timeout` seconds. `port` None is any free one."""

    name = "nccl"

    def __init__(
        self,
        bucket_bytes: int,
        device: torch.device,
        host: str,
        num_workers: int,
        timeout: float,
        port: int | None = None,
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._host = host
        self._port = port or _free_port()
        self._world_size = num_workers + 1
        self._timeout = timeout
        self._group: Any = None
        self._forming = threading.Thread(target=self._form, name="lowpeak-weights", daemon=True)
        self._forming.start()

    def invitation(self) -> dict[str, Any]:
        """Where the group forms; each worker adds its rank."""
        given = {"host": self._host, "port": self._port, "world_size": self._world_size}
        return {"transport": self.name, "num_bytes": self._bucket_bytes, **given}

    def joined(self) -> None:
        """Wait until the group stands."""
        self._forming.join(self._timeout)
        if self._group is None:
            raise EngineError("The NCCL group for weights did not form: set vllm_transport='tcp'.")

    def buffer(self, device: torch.device) -> Tensor:
        """Bytes on the trainer's device."""
        return torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._device)

    def deliver(self, bucket: Bucket, ask: Ask) -> None:
        """Broadcast while the workers take part, and wait for them."""
        failed: list[BaseException] = []

        def take_part() -> None:
            try:
                ask({"num_bytes": len(bucket.data)})
            except BaseException as error:
                failed.append(error)

        answering = threading.Thread(target=take_part, name="lowpeak-weights", daemon=True)
        answering.start()
        self._group.broadcast(bucket.data, src=0)
        answering.join()
        if failed:
            raise failed[0]
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Let the group go."""
        self._group = None

    def _form(self) -> None:
        with torch.cuda.device(self._device):
            self._group = _group(self._host, self._port, 0, self._world_size, self._device)


class NcclInlet:
    """A worker's end, as `rank` of the group."""

    def __init__(self, host: str, port: int, world_size: int, num_bytes: int, rank: int, device: torch.device) -> None:
        self._group = _group(host, port, rank, world_size, device)
        self._data = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        """The broadcast bytes."""
        data = self._data[: arguments["num_bytes"]]
        self._group.broadcast(data, src=0)
        return data

    def close(self) -> None:
        """Let group and buffer go."""
        self._group = None
        self._data = torch.empty(0, dtype=torch.uint8)


def first_ranks(nums_workers: Sequence[int]) -> list[int]:
    """The rank of each engine's first worker, behind the trainer's."""
    return [1 + sum(nums_workers[:i]) for i in range(len(nums_workers))]


def _group(host: str, port: int, rank: int, world_size: int, device: torch.device) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    meeting = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)
    return PyNcclCommunicator(meeting, device=device)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port

"""Workers on other devices: the trainer broadcasts each bucket to all of them over NCCL.

The group is vLLM's `StatelessProcessGroup` with its `PyNcclCommunicator`, which its own weight transfer is made of: it stands
beside the trainer's process groups and ends with the update. The trainer is rank 0, the workers of all engines follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowpeak.errors import EngineError
from lowpeak.vllm.protocol import start_thread
from lowpeak.vllm.serving import free_ports
from lowpeak.vllm.weight_sync.buckets import Bucket
from lowpeak.vllm.weight_sync.transports.base import BucketReceiver, BucketSender, TakeCall

GroupFactory = Callable[
    [str, int, int, int, torch.device], Any
]  # a group of host, port, rank, number of ranks and device


class NcclSender(BucketSender):
    """The trainer's end; forming the group and each bucket may take `timeout` seconds. `port` None is any free one.

    `form` makes the group.
    """

    name = "nccl"

    def __init__(
        self,
        bucket_bytes: int,
        device: torch.device,
        host: str,
        num_workers: int,
        timeout: float,
        port: int | None = None,
        form: GroupFactory | None = None,
    ) -> None:
        super().__init__(bucket_bytes, device)
        port, world_size = port or free_ports(1, "")[0], num_workers + 1
        self._meeting = {"host": host, "port": port, "world_size": world_size}
        self._timeout = timeout
        self._closed = False
        self._forming = start_thread(partial(form or _make_group, host, port, 0, world_size, device))

    def invitation(self) -> dict[str, Any]:
        return {"transport": self.name, "num_bytes": self._bucket_bytes, **self._meeting}

    def joined(self) -> None:
        try:
            self._group = self._forming.result(self._timeout)
        except Exception as error:
            reason = f"not within {self._timeout:.0f} s" if isinstance(error, TimeoutError) else str(error)
            raise EngineError(
                f"The NCCL group for weights did not form ({reason}): set vllm_transport='tcp'."
            ) from error

    def deliver(self, bucket: Bucket, ask: TakeCall) -> None:
        answering = start_thread(partial(ask, {"num_bytes": len(bucket.data)}))
        self._group.broadcast(bucket.data, src=0)
        answering.result()
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """End the group, now or when it has formed at last: nothing else frees its device memory."""
        if not self._closed:
            self._closed = True
            self._forming.add_done_callback(_destroy_group)


def _destroy_group(forming: Future[Any]) -> None:
    if forming.exception() is None:
        forming.result().destroy()


class NcclReceiver(BucketReceiver):
    """A worker's end, as `rank` of the group."""

    def __init__(
        self,
        host: str,
        port: int,
        world_size: int,
        num_bytes: int,
        rank: int,
        device: torch.device,
        form: GroupFactory | None = None,
    ) -> None:
        self._group = (form or _make_group)(host, port, rank, world_size, device)
        self._data = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        data = self._data[: arguments["num_bytes"]]
        self._group.broadcast(data, src=0)
        return data

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.destroy()
        self._data = torch.empty(0, dtype=torch.uint8)


def _make_group(host: str, port: int, rank: int, world_size: int, device: torch.device) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    with torch.cuda.device(device):
        meeting = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)
        return check_communicator(PyNcclCommunicator(meeting, device=device))


def check_communicator(communicator: Any) -> Any:
    """The communicator; EngineError where it found no NCCL library, since its broadcasts then do nothing, without a word."""
    if getattr(communicator, "disabled", False):
        raise EngineError("vLLM finds no NCCL library on this machine.")
    return communicator

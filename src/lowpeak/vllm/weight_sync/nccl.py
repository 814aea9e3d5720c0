"""Transport to workers on other GPUs: the trainer broadcasts each bucket over NCCL.

The group is vLLM's `StatelessProcessGroup` with its `PyNcclCommunicator`, as in vLLM's weight transfer: it is
independent of the trainer's process groups and ends with the update. The trainer is rank 0, the workers of all
engines follow.
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
from lowpeak.vllm.weight_sync.buckets import Bucket, BucketReceiver, BucketSender, ReceiveCall

# Arguments: host, port, rank, world size, device.
GroupFactory = Callable[[str, int, int, int, torch.device], Any]


class NcclSender(BucketSender):
    """Trainer's end; forming the group, and each bucket, may take `timeout` seconds. `port` None is any free port."""

    name = "nccl"

    def __init__(
        self,
        bucket_bytes: int,
        device: torch.device,
        host: str,
        num_workers: int,
        timeout: float,
        port: int | None = None,
        make_group: GroupFactory | None = None,
    ) -> None:
        super().__init__(bucket_bytes, device)
        port, world_size = port or free_ports(1, "")[0], num_workers + 1
        self._address = {"host": host, "port": port, "world_size": world_size}
        self._timeout = timeout
        self._closed = False
        self._group_future = start_thread(partial(make_group or _make_group, host, port, 0, world_size, device))

    def invitation(self) -> dict[str, Any]:
        return {"transport": self.name, "num_bytes": self._bucket_bytes, **self._address}

    def wait_connected(self) -> None:
        try:
            self._group = self._group_future.result(self._timeout)
        except Exception as error:
            reason = f"not within {self._timeout:.0f} s" if isinstance(error, TimeoutError) else str(error)
            raise EngineError(
                f"The NCCL group for weights could not be formed ({reason}): set vllm_transport='tcp'."
            ) from error

    def deliver(self, bucket: Bucket, receive: ReceiveCall) -> None:
        taking = start_thread(partial(receive, {"num_bytes": len(bucket.data)}))
        self._group.broadcast(bucket.data, src=0)
        taking.result()
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Destroy the group, now or once it has formed: nothing else frees its device memory."""
        if not self._closed:
            self._closed = True
            self._group_future.add_done_callback(_destroy_group)


def _destroy_group(future: Future[Any]) -> None:
    if future.exception() is None:
        future.result().destroy()


class NcclReceiver(BucketReceiver):
    """Worker's end, as `rank` of the group."""

    def __init__(
        self,
        host: str,
        port: int,
        world_size: int,
        num_bytes: int,
        rank: int,
        device: torch.device,
        make_group: GroupFactory | None = None,
    ) -> None:
        self._group = (make_group or _make_group)(host, port, rank, world_size, device)
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
        group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)
        return check_communicator(PyNcclCommunicator(group, device=device))


def check_communicator(communicator: Any) -> Any:
    """Return the communicator; raise EngineError if it found no NCCL library, because its broadcasts would do
    nothing.
    """
    if getattr(communicator, "disabled", False):
        raise EngineError("vLLM finds no NCCL library on this machine.")
    return communicator


def device_id(device: torch.device) -> str:
    """Return a name of the device that is equal in all processes of its host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type

"""Transport to workers on other GPUs: the trainer broadcasts each bucket over NCCL.

The group is vLLM's `PyNcclCommunicator`, as in vLLM's weight transfer: it is independent of the trainer's process
groups. The trainer is rank 0, the workers of all engines follow. Forming it takes 0.3 to 2 s, so both ends keep it
between updates. NCCL's memory is not in the pool of vLLM's sleep mode.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowpeak.errors import EngineError
from lowpeak.vllm.protocol import start_thread
from lowpeak.vllm.serving import free_ports
from lowpeak.vllm.weight_sync.buckets import Bucket, BucketReceiver, BucketSender, ReceiveCall


class TrainerGroup:
    """Trainer's end of the group, which updates share as long as every worker keeps its end.

    invite(device, host, worker_groups)     # in each update; `invitation` is for the workers
    wait_formed(timeout)                    # once all workers have joined
    close()                                 # after a failed update, and at the end
    """

    def __init__(self) -> None:
        self.invitation: dict[str, Any] = {}
        self._future: Future[Any] | None = None

    @property
    def is_open(self) -> bool:
        return self._future is not None

    def invite(
        self, device: torch.device, host: str, worker_groups: Sequence[str | None], port: int | None = None
    ) -> None:
        """Form a group in a thread, unless this one has exactly these workers. `port` None is any free port."""
        world_size = len(worker_groups) + 1
        if (
            self.is_open
            and {*worker_groups} == {self.invitation["group"]}
            and world_size == self.invitation["world_size"]
        ):
            return
        self.close()
        port = port or free_ports(1, "")[0]
        self.invitation = {"group": secrets.token_hex(8), "host": host, "port": port, "world_size": world_size}
        self._future = start_thread(partial(_make_group, host, port, 0, world_size, device))

    def wait_formed(self, timeout: float) -> Any:
        """Return the communicator; raise EngineError if the group is not formed within `timeout` seconds."""
        assert self._future is not None, "invite() comes first"
        try:
            return self._future.result(timeout)
        except Exception as error:
            reason = f"not within {timeout:.0f} s" if isinstance(error, TimeoutError) else str(error)
            raise EngineError(
                f"The NCCL group for weights could not be formed ({reason}): set vllm_transport='tcp'."
            ) from error

    def close(self) -> None:
        """Destroy the communicator, now or once it has formed: nothing else frees its device memory."""
        future, self._future = self._future, None
        if future is not None:
            future.add_done_callback(_destroy_communicator)


def _destroy_communicator(future: Future[Any]) -> None:
    if future.exception() is None:
        future.result().destroy()


class NcclSender(BucketSender):
    """Trainer's end of an update; forming the group may take `timeout` seconds."""

    name = "nccl"

    def __init__(self, bucket_bytes: int, device: torch.device, group: TrainerGroup, timeout: float) -> None:
        super().__init__(bucket_bytes, device)
        self._group, self._timeout = group, timeout

    def invitation(self) -> dict[str, Any]:
        return {"transport": self.name, "num_bytes": self._bucket_bytes, **self._group.invitation}

    def wait_connected(self) -> None:
        self._communicator = self._group.wait_formed(self._timeout)

    def deliver(self, bucket: Bucket, receive: ReceiveCall) -> None:
        taking = start_thread(partial(receive, {"num_bytes": len(bucket.data)}))
        try:
            self._communicator.broadcast(bucket.data, src=0)
        except BaseException:
            # A worker that still asks for this bucket would take one of the next update's.
            self._group.close()
            wait([taking])
            raise
        taking.result()
        torch.cuda.synchronize(self._device)


class WorkerGroup:
    """Worker's end of the group, kept between updates until the trainer invites to another one."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._communicator: Any = None

    def join(self, group: str, host: str, port: int, world_size: int, rank: int, device: torch.device) -> Any:
        """Return the communicator of the group with this name, as its `rank`."""
        if group != self.name:
            self.close()
            self._communicator = _make_group(host, port, rank, world_size, device)
            self.name = group
        return self._communicator

    def close(self) -> None:
        communicator, self._communicator, self.name = self._communicator, None, None
        if communicator is not None:
            communicator.destroy()


class NcclReceiver(BucketReceiver):
    """Worker's end of an update."""

    def __init__(self, communicator: Any, num_bytes: int, device: torch.device) -> None:
        self._communicator = communicator
        self._data = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        data = self._data[: arguments["num_bytes"]]
        self._communicator.broadcast(data, src=0)
        return data

    def close(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)


def _make_group(host: str, port: int, rank: int, world_size: int, device: torch.device) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    with torch.cuda.device(device):
        group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)
        communicator = check_communicator(PyNcclCommunicator(group, device=device))
    # The group's store listens for pickles, and only forming the communicator needs it.
    communicator.group = None
    return communicator


def check_communicator(communicator: Any) -> Any:
    """Return the communicator; raise EngineError if it has no NCCL library: its broadcasts would do nothing."""
    if getattr(communicator, "disabled", False):
        raise EngineError("vLLM finds no NCCL library on this machine.")
    return communicator


def device_id(device: torch.device) -> str:
    """Return a name of the device that is equal in all processes of its host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type

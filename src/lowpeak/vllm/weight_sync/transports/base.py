"""Transport of buckets to vLLM's workers: a sender in the trainer and a receiver in each worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowpeak.vllm.weight_sync.buckets import Bucket

TakeCall = Callable[[Mapping[str, Any]], None]  # calls `lowpeak_take` on every worker with the transport's arguments


class BucketSender:
    """Trainer's end, for all workers of all engines of one update."""

    name: str  # in the settings

    def __init__(self, bucket_bytes: int, device: torch.device | None) -> None:
        self._bucket_bytes = bucket_bytes
        self._device = device

    def invitation(self) -> dict[str, Any]:
        """Return the values that a worker needs to connect, as JSON."""
        raise NotImplementedError

    def wait_connected(self) -> None:
        """Wait until every worker is connected; called once all have opened their receivers."""

    def buffer(self, device: torch.device) -> Tensor:
        """Return the buffer for buckets of values on `device`."""
        return torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._device or device)

    def deliver(self, bucket: Bucket, take: TakeCall) -> None:
        """Send a bucket to every worker; afterwards the buffer may be refilled."""
        raise NotImplementedError

    def close(self) -> None:
        """Release all resources, also after a failed update."""


class BucketReceiver:
    """Worker's end."""

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        """Return the bytes of the next bucket, valid until the next call; `arguments` are those of `lowpeak_take`."""
        raise NotImplementedError

    def close(self) -> None:
        """Release all resources."""


class ProcessSender(BucketSender):
    """Trainer's end within one process: a buffer on the values' device, which the worker reads directly."""

    name = "process"

    def invitation(self) -> dict[str, Any]:
        return {"transport": self.name}

    def deliver(self, bucket: Bucket, take: TakeCall) -> None:
        take({"data": bucket.data})


class ProcessReceiver(BucketReceiver):
    """Worker's end within one process."""

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        data: Tensor = arguments["data"]
        return data

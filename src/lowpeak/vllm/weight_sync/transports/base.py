"""A way for bytes to reach vLLM's workers: an end that fills buckets and one that reads them; both, of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowpeak.vllm.weight_sync.buckets import Bucket

TakeCall = Callable[[Mapping[str, Any]], None]  # makes every worker take a bucket, with what it needs to find it


class BucketSender:
    """The trainer's end, for all workers of all engines of one update."""

    name: str  # the transport's in the settings

    def __init__(self, bucket_bytes: int, device: torch.device | None) -> None:
        self._bucket_bytes = bucket_bytes
        self._device = device

    def invitation(self) -> dict[str, Any]:
        """What a worker needs to open its end, for JSON; made before any worker is asked."""
        raise NotImplementedError

    def joined(self) -> None:
        """Every worker has opened its end."""

    def buffer(self, device: torch.device) -> Tensor:
        """The bytes that buckets are filled in, where the values are on `device`."""
        return torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._device or device)

    def deliver(self, bucket: Bucket, ask: TakeCall) -> None:
        """Give a bucket to every worker; when this returns, the buffer may be filled again."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave nothing behind, however the update ended."""


class BucketReceiver:
    """A worker's end."""

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        """The bytes of the bucket that `arguments` speak of, good until the next call."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave nothing behind."""


class ProcessSender(BucketSender):
    """The trainer's end in one process: a buffer on the device of the values, which the worker reads itself."""

    name = "process"

    def invitation(self) -> dict[str, Any]:
        return {"transport": self.name}

    def deliver(self, bucket: Bucket, ask: TakeCall) -> None:
        ask({"data": bucket.data})


class ProcessReceiver(BucketReceiver):
    """The worker's end in one process."""

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        data: Tensor = arguments["data"]
        return data

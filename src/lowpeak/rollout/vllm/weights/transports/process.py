"""Workers in this process: they read the bucket where it was filled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowpeak.rollout.vllm.weights.buckets import Bucket
from lowpeak.rollout.vllm.weights.transports.transport import Ask


class ProcessSender:
    """The trainer's end: one buffer on the device of the values."""

    name = "process"

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    def invitation(self) -> dict[str, Any]:
        """Nothing but the name."""
        return {"transport": self.name}

    def joined(self) -> None:
        """Nothing is waited for."""

    def buffer(self, device: torch.device) -> Tensor:
        """Bytes beside the values."""
        return torch.empty(self._bucket_bytes, dtype=torch.uint8, device=device)

    def deliver(self, bucket: Bucket, ask: Ask) -> None:
        """Hand the bucket over as it is."""
        ask({"data": bucket.data})

    def close(self) -> None:
        """Nothing is left behind."""


class ProcessInlet:
    """The worker's end."""

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        """The bucket itself."""
        data: Tensor = arguments["data"]
        return data

    def close(self) -> None:
        """Nothing is left behind."""

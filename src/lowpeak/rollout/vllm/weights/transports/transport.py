"""What a way for bytes to reach vLLM's workers has: an end that fills buckets and one that reads them, in one file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lowpeak.rollout.vllm.weights.buckets import Bucket

Ask = Callable[[Mapping[str, Any]], None]  # makes every worker take a bucket, with what it needs to find it


class Sender(Protocol):
    """The trainer's end, for all workers of all engines of one update."""

    @property
    def name(self) -> str:
        """The transport's name in the settings."""

    def invitation(self) -> dict[str, Any]:
        """What a worker needs to open its end, for JSON; made before any worker is asked."""

    def joined(self) -> None:
        """Every worker has opened its end."""

    def buffer(self, device: torch.device) -> Tensor:
        """The bytes that buckets are filled in, where the values are on `device`."""

    def deliver(self, bucket: Bucket, ask: Ask) -> None:
        """Give a bucket to every worker; when this returns, the buffer may be filled again."""

    def close(self) -> None:
        """Leave nothing behind, however the update ended."""


class Inlet(Protocol):
    """A worker's end."""

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        """The bytes of the bucket that `arguments` speak of, good until the next call."""

    def close(self) -> None:
        """Leave nothing behind."""

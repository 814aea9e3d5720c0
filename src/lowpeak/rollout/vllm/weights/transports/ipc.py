"""Workers on the device that trains, in other processes: they map the bucket's device memory by its CUDA IPC handle."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.weights.buckets import Bucket
from lowpeak.rollout.vllm.weights.transports.transport import Ask


class IpcSender:
    """The trainer's end: a buffer on its device, whose handle travels as JSON.

    The handle is torch's own (`UntypedStorage._share_cuda_`). It names memory of cudaMalloc: with
    `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` there is none.
    """

    name = "ipc"

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self._buffer = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)

    def invitation(self) -> dict[str, Any]:
        """The handle, its bytes in base 64."""
        shared = self._buffer.untyped_storage()._share_cuda_()
        return {
            "transport": self.name,
            "handle": [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in shared[1:]],
            "first": self._buffer.storage_offset(),
            "num_bytes": len(self._buffer),
        }

    def joined(self) -> None:
        """Nothing is waited for."""

    def buffer(self, device: torch.device) -> Tensor:
        """The shared bytes; the values must be on their device."""
        if device != self._buffer.device:
            raise EngineError(f"Weights on {device} cannot be shared by CUDA IPC: use another vllm_transport.")
        return self._buffer

    def deliver(self, bucket: Bucket, ask: Ask) -> None:
        """The bytes are there when the device has written them; the workers answer when theirs has read them."""
        torch.cuda.synchronize(self._buffer.device)
        ask({})

    def close(self) -> None:
        """Let go of the buffer."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


class IpcInlet:
    """The worker's end, on its own number for the same device."""

    def __init__(self, handle: Sequence[Any], first: int, num_bytes: int, device: torch.device) -> None:
        parts = [base64.b64decode(part) if isinstance(part, str) else part for part in handle]
        storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *parts)
        whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self._data = whole[first : first + num_bytes]

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        """The shared bytes."""
        return self._data

    def close(self) -> None:
        """Unmap them."""
        self._data = torch.empty(0, dtype=torch.uint8)

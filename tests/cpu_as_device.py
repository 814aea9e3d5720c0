"""The CPU's memory as a device and as its host, for what moves between the two."""

from __future__ import annotations

import torch
from torch import Tensor


class CopyingMover:
    """The CPU's memory as device and host; it counts, and can be full."""

    device = torch.device("cpu")

    def __init__(self, room: int = 1 << 40) -> None:
        self.room, self.settled = room, 0

    def to_host(self, flat: Tensor) -> Tensor:
        self.room -= flat.numel()
        if self.room < 0:
            raise torch.OutOfMemoryError("the host is full")
        return flat.clone()

    def to_device(self, host: Tensor, flat: Tensor) -> None:
        self.room += host.numel()
        flat.copy_(host)

    def synchronize(self) -> None:
        self.settled += 1

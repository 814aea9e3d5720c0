"""The CPU's memory as a device and as its host, for what moves between the two."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from lowpeak.memory.activation_offload import AsyncHostMover


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


class Streams:
    """A device's module whose streams write down what they do, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.computing = Stream(self, "compute")

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, "copy")

    def current_stream(self, device: torch.device) -> Stream:
        return self.computing

    def stream(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()


class Stream:
    def __init__(self, owner: Streams, name: str) -> None:
        self.owner, self.name, self.recorded = owner, name, 0

    def wait_stream(self, other: Stream) -> None:
        self.owner.events.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: int) -> None:
        self.owner.events.append(f"{self.name} waits for copy {event}")

    def record_event(self) -> int:
        self.recorded += 1
        self.owner.events.append(f"copy {self.recorded} begins")
        return self.recorded


class StreamingMover(AsyncHostMover):
    """The mover of a device whose host memory takes no bytes. It holds no copy that has arrived: `live` are those in use."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.live: list[weakref.ref[Tensor]] = []
        self.most_bytes = 0

    def empty_on_host(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="meta")

    def to_device(self, host: Tensor) -> Tensor:
        flat = super().to_device(host)
        self.live = [ref for ref in (*self.live, weakref.ref(flat)) if ref() is not None]
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        return flat

    @property
    def live_bytes(self) -> int:
        return sum(flat.nbytes for ref in self.live if (flat := ref()) is not None)


def streaming_mover(monkeypatch: pytest.MonkeyPatch) -> tuple[StreamingMover, list[str]]:
    """A mover of the CPU as a device, and what its streams do."""
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    return StreamingMover(torch.device("cpu")), streams.events

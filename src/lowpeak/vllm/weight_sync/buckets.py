"""Buckets of weight slices, packed into one reused buffer, and the two ends of a transport of buckets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lowpeak.errors import EngineError, shorten_names
from lowpeak.records import WeightSlice
from lowpeak.vllm.weight_sync.verification import Checksum, read_checksums

ALIGNMENT = 64  # of a piece in the bucket, plus its offset within an 8-byte word of the tensor


@dataclass(frozen=True)
class Piece:
    """Flat range of one tensor within a bucket.

    It has `count` elements from the tensor's element `start`, at byte `offset` of the bucket.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    count: int
    offset: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def is_complete(self) -> bool:
        return self.count == self.numel

    def values_in(self, bucket: Tensor) -> Tensor:
        return bucket[self.offset : self.offset + self.count * self.dtype.itemsize].view(self.dtype)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Piece:
        return Piece(**{**fields, "shape": tuple(fields["shape"]), "dtype": getattr(torch, fields["dtype"])})


@dataclass(frozen=True)
class Bucket:
    """Pieces and their bytes; valid until the next bucket is requested."""

    pieces: tuple[Piece, ...]
    data: Tensor


@dataclass
class ChecksumTable:
    """Checksums of all tensors of an update, sent or skipped, and the seconds they took."""

    of: dict[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    _open: dict[str, Checksum] = field(default_factory=dict)
    _num_missing: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, num_bytes: int, first: int, values: Tensor, source: Tensor | None = None) -> None:
        """Add a range of a tensor of `num_bytes` that starts at byte `first`; for `source` see `Checksum.add`."""
        if name not in self._open:
            self._open[name] = Checksum(num_bytes, values.device)
            self._num_missing[name] = num_bytes
        self._open[name].add(first, values, source)
        self._num_missing[name] -= values.numel() * values.element_size()
        if not self._num_missing[name]:
            total = self._open.pop(name)
            self.of[name] = total.value()
            self.seconds += total.seconds

    def read(self) -> dict[str, str]:
        """Return all checksums as hexadecimal; raise EngineError if a tensor is incomplete."""
        if self._open:
            raise EngineError(f"The slices of {shorten_names(self._open)} do not cover the whole tensor.")
        return read_checksums(self.of)


def fill_buckets(
    slices: Iterable[WeightSlice],
    buffer: Callable[[torch.device], Tensor],
    sums: ChecksumTable | None,
    skipped: Collection[str] = (),
) -> Iterator[Bucket]:
    """Pack slices into buckets of at most the buffer's length; sum `skipped` tensors without packing them.

    `buffer` is called once, with the device of the first slice. A slice that exceeds the bucket's remaining space is
    split.
    """
    builder: _BucketBuilder | None = None
    for weight_slice in slices:
        if weight_slice.name in skipped:
            _copy_and_sum(weight_slice, 0, weight_slice.values, None, sums)
            continue
        builder = builder or _BucketBuilder(buffer(weight_slice.values.device))
        done = 0
        while done < weight_slice.values.numel():
            count = builder.add(weight_slice, done, sums)
            if not count:
                yield builder.bucket(weight_slice.name)
                builder = _BucketBuilder(builder.data)
            done += count
    if builder and builder.pieces:
        yield builder.bucket(builder.pieces[-1].name)


@dataclass
class _BucketBuilder:
    """Bucket under construction: the buffer, its pieces, and the end of the used bytes."""

    data: Tensor
    pieces: list[Piece] = field(default_factory=list)
    end: int = 0

    def add(self, weight_slice: WeightSlice, done: int, sums: ChecksumTable | None) -> int:
        """Add as much of the slice as fits, from its element `done` on; return how many elements were added."""
        name, start, size = weight_slice.name, weight_slice.start + done, weight_slice.dtype.itemsize
        last = self.pieces[-1] if self.pieces else None
        extends_last = last is not None and (last.name, last.start + last.count) == (name, start)
        # The tensor's 8-byte words stay aligned, so that both sides can sum whole words.
        offset = self.end if extends_last else -(-self.end // ALIGNMENT) * ALIGNMENT + start * size % 8
        count = min(weight_slice.values.numel() - done, (len(self.data) - offset) // size)
        if count <= 0:
            return 0
        piece = Piece(name, weight_slice.shape, weight_slice.dtype, start, count, offset)
        values = weight_slice.values[done : done + count]
        _copy_and_sum(weight_slice, done, values, piece.values_in(self.data), sums)
        if extends_last and last:
            # Joined, so that a tensor whose slices are all in one bucket is one piece, which the worker loads without a copy.
            self.pieces[-1] = replace(last, count=last.count + count)
        else:
            self.pieces.append(piece)
        self.end = offset + count * size
        return count

    def bucket(self, name: str) -> Bucket:
        """Return the bucket; raise EngineError if the buffer is too small for an element of the tensor `name`."""
        if not self.pieces:
            raise EngineError(
                f"A bucket of {len(self.data)} bytes is too small for an element of {name}: use buckets of at least 4096 bytes."
            )
        return Bucket(tuple(self.pieces), self.data[: self.end])


def _copy_and_sum(
    weight_slice: WeightSlice, done: int, values: Tensor, into: Tensor | None, sums: ChecksumTable | None
) -> None:
    """Copy values to `into` and add them to the checksums, if given."""
    # One pass over memory instead of two if both are on one device.
    in_one_pass = into is not None and sums is not None and into.device == values.device
    if into is not None and not in_one_pass:
        into.copy_(values)
    if sums is not None:
        size, num_elements = weight_slice.dtype.itemsize, torch.Size(weight_slice.shape).numel()
        target, source = (into, values) if into is not None and in_one_pass else (values, None)
        sums.add(weight_slice.name, num_elements * size, (weight_slice.start + done) * size, target, source)


ReceiveCall = Callable[
    [Mapping[str, Any]], None
]  # calls `lowpeak_receive` on every worker with the transport's arguments


class BucketSender(ABC):
    """Trainer's end, for all workers of all engines of one update."""

    name: str  # in the settings

    def __init__(self, bucket_bytes: int, device: torch.device | None) -> None:
        self._bucket_bytes = bucket_bytes
        self._device = device

    @abstractmethod
    def invitation(self) -> dict[str, Any]:
        """Return the values that a worker needs to connect, as JSON."""

    def wait_connected(self) -> None:
        """Wait until every worker is connected; called once all have opened their receivers."""
        return

    def buffer(self, device: torch.device) -> Tensor:
        """Return the buffer for buckets of values on `device`."""
        return torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._device or device)

    @abstractmethod
    def deliver(self, bucket: Bucket, receive: ReceiveCall) -> None:
        """Send a bucket to every worker; afterwards the buffer may be refilled."""

    def close(self) -> None:
        """Release all resources, also after a failed update."""
        return


class BucketReceiver(ABC):
    """Worker's end."""

    @abstractmethod
    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        """Return the bytes of the next bucket, valid until the next call; `arguments` are those of `lowpeak_receive`."""

    def close(self) -> None:
        """Release all resources."""
        return


class ProcessSender(BucketSender):
    """Trainer's end within one process: a buffer on the values' device, which the worker reads directly."""

    name = "process"

    def invitation(self) -> dict[str, Any]:
        return {"transport": self.name}

    def deliver(self, bucket: Bucket, receive: ReceiveCall) -> None:
        receive({"data": bucket.data})


class ProcessReceiver(BucketReceiver):
    """Worker's end within one process."""

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        data: Tensor = arguments["data"]
        return data

"""Slices gathered into buckets of bounded size: one buffer, filled again and again, and what lies where in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowpeak.errors import EngineError
from lowpeak.records import WeightSlice
from lowpeak.vllm.weight_sync.checksum import Checksum

Key = TypeVar("Key", bound=Hashable)
ALIGNMENT = 64  # of a piece in the bucket, plus what puts its words where the tensor has them


@dataclass(frozen=True)
class Piece:
    """A flat range of one tensor in a bucket: `count` elements from `start`, which lie from byte `offset` on."""

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
    def is_whole(self) -> bool:
        return self.count == self.numel

    def values_in(self, bucket: Tensor) -> Tensor:
        return bucket[self.offset : self.offset + self.count * self.dtype.itemsize].view(self.dtype)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}

    @staticmethod
    def from_json(given: Mapping[str, Any]) -> Piece:
        return Piece(**{**given, "shape": tuple(given["shape"]), "dtype": getattr(torch, given["dtype"])})


@dataclass(frozen=True)
class Bucket:
    """Pieces and the bytes that hold them; good until the next bucket is asked for."""

    pieces: tuple[Piece, ...]
    data: Tensor


@dataclass
class ChecksumTable:
    """The checksum of every tensor that passed, whether it was sent or held back, and what they took."""

    of: dict[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    _open: dict[str, Checksum] = field(default_factory=dict)
    _left: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, num_bytes: int, first: int, values: Tensor, source: Tensor | None = None) -> None:
        """Take a range of a tensor of `num_bytes`, whose first byte is `first`; from `source` where one is given, see Checksum."""
        if name not in self._open:
            self._open[name] = Checksum(num_bytes, values.device)
            self._left[name] = num_bytes
        self._open[name].add(first, values, source)
        self._left[name] -= values.numel() * values.element_size()
        if not self._left[name]:
            total = self._open.pop(name)
            self.of[name] = total.value()
            self.seconds += total.seconds

    def read(self) -> dict[str, str]:
        """All of them as hexadecimal, read from the device together; EngineError where a tensor is not whole."""
        if self._open:
            raise EngineError(f"The slices of {shorten_names(self._open)} ended before the tensor did.")
        return read_checksums(self.of)


def read_checksums(sums: Mapping[Key, Tensor]) -> dict[Key, str]:
    """Checksums as hexadecimal, which JSON keeps whole; one read for each device that they live on."""
    found: dict[Key, str] = {}
    for device in {value.device for value in sums.values()}:
        names = [name for name, value in sums.items() if value.device == device]
        numbers = torch.stack([sums[name] for name in names]).tolist()
        found |= {name: f"{number % 2**64:016x}" for name, number in zip(names, numbers, strict=True)}
    return found


def shorten_names(names: Iterable[str], most: int = 5) -> str:
    """Return a handful of names, and how many more there are."""
    found = sorted(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def fill_buckets(
    slices: Iterable[WeightSlice],
    buffer: Callable[[torch.device], Tensor],
    sums: ChecksumTable | None,
    held_back: Collection[str] = (),
) -> Iterator[Bucket]:
    """Buckets of the slices' values, each at most the buffer long; what is `held_back` is summed and not sent.

    The buffer is asked for once, with the device of the first slice. A slice that is longer than what is left is cut.
    """
    filling: _BucketBuilder | None = None
    for piece in slices:
        if piece.name in held_back:
            _copy_and_sum(piece, 0, piece.values, None, sums)
            continue
        filling = filling or _BucketBuilder(buffer(piece.values.device))
        done = 0
        while done < piece.values.numel():
            count = filling.take(piece, done, sums)
            if not count:
                yield filling.bucket(piece)
                filling = _BucketBuilder(filling.data)
            done += count
    if filling and filling.pieces:
        yield filling.bucket(filling.pieces[-1])


@dataclass
class _BucketBuilder:
    """The bucket that is being filled: what it holds, and the byte of the buffer where that ends."""

    data: Tensor
    pieces: list[Piece] = field(default_factory=list)
    end: int = 0

    def take(self, piece: WeightSlice, done: int, sums: ChecksumTable | None) -> int:
        """Take what fits of the slice's values from `done` on, and return how many that are."""
        start, size = piece.start + done, piece.dtype.itemsize
        last = self.pieces[-1] if self.pieces else None
        goes_on = last is not None and (last.name, last.start + last.count) == (piece.name, start)
        # Words of the tensor stay words, so that both sides sum fast.
        offset = self.end if goes_on else -(-self.end // ALIGNMENT) * ALIGNMENT + start * size % 8
        count = min(piece.values.numel() - done, (len(self.data) - offset) // size)
        if count <= 0:
            return 0
        placed = Piece(piece.name, piece.shape, piece.dtype, start, count, offset)
        _copy_and_sum(piece, done, piece.values[done : done + count], placed.values_in(self.data), sums)
        if goes_on and last:  # as one piece: a tensor whose slices are all in a bucket is whole there
            self.pieces[-1] = replace(last, count=last.count + count)
        else:
            self.pieces.append(placed)
        self.end = offset + count * size
        return count

    def bucket(self, piece: WeightSlice | Piece) -> Bucket:
        """What was taken; EngineError where the whole buffer is too small for an element of `piece`."""
        if not self.pieces:
            raise EngineError(
                f"A bucket of {len(self.data)} bytes holds no element of {piece.name}: give buckets of at least 4096 bytes."
            )
        return Bucket(tuple(self.pieces), self.data[: self.end])


def _copy_and_sum(
    piece: WeightSlice, done: int, values: Tensor, into: Tensor | None, sums: ChecksumTable | None
) -> None:
    """Copy values and sum them, on the way where both are on one device; or the one of the two that is asked for."""
    is_on_the_way = into is not None and sums is not None and into.device == values.device
    if into is not None and not is_on_the_way:
        into.copy_(values)
    if sums is not None:
        size = piece.dtype.itemsize
        held, source = (into, values) if into is not None and is_on_the_way else (values, None)
        sums.add(piece.name, torch.Size(piece.shape).numel() * size, (piece.start + done) * size, held, source)

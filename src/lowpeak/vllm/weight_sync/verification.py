"""Verification of weights: a checksum that both sides compute, and tracing of where vLLM writes a tensor.

The checksum of a tensor's bytes depends on their positions and accepts ranges in any order. The bytes, padded with zeros, are
8-byte words in a grid of `WIDTH` columns. The words of each column and of each row are summed; every sum is mixed with its
index, and the mixed values are added, all modulo 2^64:

    sums = [sum_r word[r, c] for each c] + [sum_c word[r, c] for each r]
    checksum = sum_i mix(sums[i] + (i + 1) * PLACE)
    mix(x): x *= MIX_1; x ^= x >> 32; x *= MIX_2; x ^= x >> 29        (shifts keep the sign)

A changed word changes a row's sum and a column's; so does a swap of two different words or rows. Two plain sums of words run at
memory speed (8 to 10 GB/s on one core, 20 on data that a copy left in the cache; one product per word halves that), because the
multiplications happen after the sums. A change that preserves every row's and every column's sum is not detected: the checksum
finds accidents, it does not stop an adversary.

vLLM's loaders join tensors (q, k and v), shard them (tensor parallelism), pad them (the vocabulary) and share them (a tied
head), differently in each model. So nothing is assumed: while a tensor is loaded, every write to a parameter's storage is
recorded, with its region and the checksum of its source. After the update each region is read back and summed. This detects a
tensor that was damaged in transit or overwritten by a later one, a parameter that received nothing, and any later change.
Of a loader's own writes to one place the last counts, unless it rounds: what else a loader makes of a tensor is not questioned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Key = TypeVar("Key", bound=Hashable)
RegionKey = tuple[str, int]  # tensor name, index of the region

WIDTH = 1024  # words of a row
ROW_BYTES = 8 * WIDTH
BLOCK_ROWS = 64  # summed along both axes while they are in the cache
BLOCK_ROWS_ON_DEVICES = 1 << 13
PLACE = 0x1E3779B97F4A7C15
MIX_1, MIX_2 = 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


class Checksum:
    """Checksum of a tensor of `num_bytes`, whose bytes are added in any order, each once.

    The sums are on `device`. `seconds` is the time of the summation without copies; on a GPU, only that of the kernel
    launches.
    """

    def __init__(self, num_bytes: int, device: torch.device | str = "cpu") -> None:
        self.seconds = 0.0
        self._sums = torch.zeros(WIDTH + -(-num_bytes // ROW_BYTES), dtype=torch.int64, device=device)
        self._columns, self._rows = self._sums[:WIDTH], self._sums[WIDTH:]
        self._of_block = torch.empty(WIDTH, dtype=torch.int64, device=device) if num_bytes >= ROW_BYTES else None

    def add(self, first: int, values: Tensor, source: Tensor | None = None) -> None:
        """Add a flat, contiguous range of the tensor that starts at its byte `first`.

        A `source` of the same form is copied to `values` first, block by block, so that each block is summed while it
        is in the cache.
        """
        data, source = values.view(torch.uint8), None if source is None else source.view(torch.uint8)
        to_row = min(-first % ROW_BYTES, len(data))
        end = to_row + (len(data) - to_row) // ROW_BYTES * ROW_BYTES
        if to_row:
            self._add_within_row(first, data[:to_row], None if source is None else source[:to_row])
        if end > to_row:
            self._add_rows(
                (first + to_row) // ROW_BYTES, data[to_row:end], None if source is None else source[to_row:end]
            )
        if end < len(data):
            self._add_within_row(first + end, data[end:], None if source is None else source[end:])

    def value(self) -> Tensor:
        began = time.perf_counter()
        mixed = _place_factors(len(self._sums), self._sums.device).add(self._sums).mul_(MIX_1)
        mixed.bitwise_xor_(mixed >> 32).mul_(MIX_2)
        total = mixed.bitwise_xor_(mixed >> 29).sum()
        self.seconds += time.perf_counter() - began
        return total

    def _add_within_row(self, first: int, data: Tensor, source: Tensor | None) -> None:
        """Add bytes within one row."""
        if source is not None:
            data.copy_(source)
        began = time.perf_counter()
        start = first % ROW_BYTES
        if start % 8 or len(data) % 8 or data.storage_offset() % 8:
            padded = torch.zeros(8 * (-(-(start % 8 + len(data)) // 8)), dtype=torch.uint8, device=data.device)
            padded[start % 8 : start % 8 + len(data)] = data
            data = padded
        words = data.view(torch.int64)
        self._rows[first // ROW_BYTES] += words.sum()
        self._columns[start // 8 : start // 8 + len(words)] += words
        self.seconds += time.perf_counter() - began

    def _add_rows(self, top: int, data: Tensor, source: Tensor | None) -> None:
        """Add complete rows, from row `top` on."""
        step = block_rows(data.device)
        if data.storage_offset() % 8 or (source is not None and source.storage_offset() % 8):
            if source is not None:
                data.copy_(source)
            for start in range(0, len(data), step * ROW_BYTES):
                part = data[start : start + step * ROW_BYTES].clone()
                self._add_blocks(top + start // ROW_BYTES, part.view(torch.int64).view(-1, WIDTH), None, step)
            return
        source_words = None if source is None else source.view(torch.int64).view(-1, WIDTH)
        self._add_blocks(top, data.view(torch.int64).view(-1, WIDTH), source_words, step)

    def _add_blocks(self, top: int, words: Tensor, source: Tensor | None, step: int) -> None:
        """Add complete rows, `step` at a time."""
        columns, of_block, clock = self._columns, self._of_block, time.perf_counter
        sums = self._rows[top : top + len(words)].split(step)
        # The first sum reads from memory, where row sums are faster (14 against 8 GB/s). After a copy the data is in the cache,
        # where column sums are faster.
        if source is None:
            began = clock()
            for block, rows in zip(words.split(step), sums, strict=True):
                torch.sum(block, 1, out=rows)
                columns.add_(torch.sum(block, 0, out=of_block))
            self.seconds += clock() - began
            return
        for block, source_block, rows in zip(words.split(step), source.split(step), sums, strict=True):
            block.copy_(source_block)
            began = clock()
            columns.add_(torch.sum(block, 0, out=of_block))
            torch.sum(block, 1, out=rows)
            self.seconds += clock() - began


def block_rows(device: torch.device) -> int:
    """Return the rows to sum at once: those that fit a core's cache, or those that occupy a GPU."""
    return BLOCK_ROWS if device.type == "cpu" else BLOCK_ROWS_ON_DEVICES


def _place_factors(count: int, device: torch.device) -> Tensor:
    """Return `(i + 1) * PLACE` for `count` sums; cached, since every tensor needs them."""
    factors = _PLACE_FACTORS.get(device)
    if factors is None or len(factors) < count:
        factors = torch.arange(1, 2 * count + 1, device=device).mul_(PLACE)
        _PLACE_FACTORS[device] = factors
    return factors[:count]


_PLACE_FACTORS: dict[torch.device, Tensor] = {}


def tensor_checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the checksum of a tensor's values in `dtype`; a strided tensor is never copied at once."""
    dtype = dtype or tensor.dtype
    total = Checksum(tensor.numel() * dtype.itemsize, tensor.device)
    if tensor.is_contiguous() and dtype == tensor.dtype:
        total.add(0, flatten(tensor))
        return total.value()
    first = 0
    for part in _split_flat(tensor, block_rows(tensor.device) * ROW_BYTES):
        total.add(first, part.to(dtype))
        first += len(part) * dtype.itemsize
    return total.value()


def flatten(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's values as one range; dimensions of length one may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _split_flat(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Yield the values in order, in contiguous flat parts of about `most` bytes; views if possible, otherwise small
    copies.
    """
    if tensor.is_contiguous():
        step = max(1, most // tensor.element_size())
        yield from flatten(tensor).split(step) if tensor.numel() else ()
        return
    each = tensor[0].numel() * tensor.element_size()
    if each > most:
        for part in tensor:
            yield from _split_flat(part, most)
        return
    for part in tensor.split(max(1, most // max(1, each))):
        yield part.reshape(-1).contiguous()


def read_checksums(sums: Mapping[Key, Tensor]) -> dict[Key, str]:
    """Return checksums as hexadecimal, which JSON keeps exactly; one device-to-host copy per device."""
    texts: dict[Key, str] = {}
    for device in {value.device for value in sums.values()}:
        names = [name for name, value in sums.items() if value.device == device]
        numbers = torch.stack([sums[name] for name in names]).tolist()
        texts |= {name: f"{number % 2**64:016x}" for name, number in zip(names, numbers, strict=True)}
    return texts


@dataclass(frozen=True)
class Region:
    """Region of a parameter's storage that one tensor's values were written to.

    `num_read` counts the tensor's elements in it. `expected` is the checksum of the written source; None if that is
    the complete tensor as it was sent.
    """

    parameter: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_read: int
    expected: Tensor | None

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return parameters[self.parameter].data.as_strided(self.size, self.stride, self.offset)

    @property
    def numel(self) -> int:
        return torch.Size(self.size).numel()


class WriteTracing(TorchDispatchMode):
    """Dispatch mode that records writes to parameters' storage while `tensor` is loaded."""

    def __init__(self, names: Mapping[int, str], tensor: Tensor, summing: bool) -> None:
        super().__init__()
        self._regions: dict[Hashable, Region] = {}
        self.num_filled: dict[str, int] = {}
        self._names = names
        self._tensor = tensor
        self._summing = summing

    @property
    def regions(self) -> list[Region]:
        return list(self._regions.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0].numel():
            name = self._names.get(args[0].untyped_storage().data_ptr())
            if name is not None:
                self._record(name, args[0], func, args[1:])
        return result

    def _record(self, name: str, target: Tensor, func: Any, rest: tuple[Any, ...]) -> None:
        # Any other write is padding.
        if func._overloadpacket is not torch.ops.aten.copy_:
            self.num_filled[name] = self.num_filled.get(name, 0) + target.numel()
            return
        source = rest[0]
        is_complete = target.is_contiguous() and _is_same_range(source, self._tensor) and source.dtype == target.dtype
        is_complete = is_complete or not self._summing
        expected = None if is_complete else tensor_checksum(source.expand_as(target), target.dtype)
        place = name, tuple(target.shape), tuple(target.stride()), int(target.storage_offset())
        # The last write counts: some of vLLM's loaders copy a tensor and transform it in place (Mamba's A_log). One from a
        # narrower dtype only loses bits.
        if place not in self._regions or source.itemsize >= target.itemsize:
            self._regions[place] = Region(*place, source.numel(), expected)


def _is_same_range(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same elements of the same storage in the same flat order."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.numel() == other.numel()
        and one.is_contiguous()
        and other.is_contiguous()
    )


@dataclass
class WriteMap:
    """Regions in which vLLM stored each tensor of one model.

    `expected` and `received` are checksums by region and by tensor, once verified.
    """

    model: nn.Module
    regions: dict[str, list[Region]] = field(default_factory=dict)
    expected: dict[RegionKey, str] = field(default_factory=dict)
    received: dict[str, Tensor] = field(default_factory=dict)
    _num_filled: dict[str, int] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _summing: bool = True

    def begin(self, summing: bool = True, skipped: Collection[str] = ()) -> None:
        """Record the parameters' storage, which a wake-up may move; ignore `skipped` parameters."""
        self._names, self._summing = {}, summing
        for name, parameter in self.model.named_parameters():
            if parameter.numel() and name not in skipped:
                self._names.setdefault(parameter.untyped_storage().data_ptr(), name)

    def load(self, name: str, tensor: Tensor, load: Callable[[], Any]) -> Any:
        """Call `load` and return its result; record what it wrote of `tensor`.

        The tensor's checksum is computed here unless its region's checksum is that of the complete tensor.
        """
        with WriteTracing(self._names, tensor, self._summing) as tracing:
            result = load()
        self.regions[name] = tracing.regions
        self._num_filled |= tracing.num_filled
        self.received.pop(name, None)
        if self._summing and (not tracing.regions or any(region.expected is not None for region in tracing.regions)):
            self.received[name] = tensor_checksum(tensor)
        return result

    def verify(self, sent: Mapping[str, str]) -> list[str]:
        """Return the tensors that differ in any bit from those that were sent; keep the checksums of the regions."""
        for name in self.regions.keys() - sent.keys():
            del self.regions[name]
        expected = self._expected(sent)
        actual = self._read()
        received = read_checksums({name: value for name, value in self.received.items() if name in sent})
        different = {key[0] for key in actual if actual[key] != expected[key]}
        different |= {name for name, value in received.items() if value != sent[name]}
        self.expected = actual
        return sorted(different)

    def changed(self) -> list[str]:
        """Return the tensors whose regions changed since they were verified."""
        actual = self._read()
        return sorted({key[0] for key in actual if actual[key] != self.expected.get(key)})

    def missing(self, sent: Iterable[str]) -> list[str]:
        """Return the parameters that the tensors did not fill completely; a remainder of zeros counts as padding."""
        parameters = dict(self.model.named_parameters())
        written: dict[str, list[Region]] = {}
        for name in sent:
            for region in self.regions.get(name, ()):
                written.setdefault(region.parameter, []).append(region)
        return [
            name
            for name in self._names.values()
            if not _is_covered(parameters, name, written.get(name, []), self._num_filled.get(name, 0))
        ]

    def num_placed(self, names: Iterable[str]) -> dict[str, int]:
        """Return how many elements of each tensor are in this worker's parameters."""
        return {name: sum(region.num_read for region in self.regions.get(name, ())) for name in names}

    def _expected(self, sent: Mapping[str, str]) -> dict[RegionKey, str]:
        partial = {
            (n, i): r.expected for n, rs in self.regions.items() for i, r in enumerate(rs) if r.expected is not None
        }
        complete = {(n, i): sent[n] for n, rs in self.regions.items() for i, r in enumerate(rs) if r.expected is None}
        return read_checksums(partial) | complete

    def _read(self) -> dict[RegionKey, str]:
        parameters = dict(self.model.named_parameters())
        return read_checksums(
            {
                (name, i): tensor_checksum(region.of(parameters))
                for name, regions in self.regions.items()
                for i, region in enumerate(regions)
            }
        )


def _is_covered(parameters: Mapping[str, Tensor], name: str, regions: list[Region], num_filled: int) -> bool:
    parameter = parameters[name]
    num_written = sum(region.numel for region in regions)
    if num_written + num_filled >= parameter.numel():
        return True
    nonzero = sum(int(torch.count_nonzero(region.of(parameters))) for region in regions)
    return num_written > 0 and int(torch.count_nonzero(parameter.data)) == nonzero

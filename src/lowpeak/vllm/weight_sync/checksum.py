"""A checksum of a tensor's bytes that sees where each one stands, and takes them in pieces as they come.

A tensor's bytes, padded with zeros, are words of 8 in a grid of `WIDTH` columns. Each column's words are summed and each row's;
every sum is mixed with its place among them, and the mixed ones are added, all modulo 2^64:

    sums = [sum_r word[r, c] for each c] + [sum_c word[r, c] for each r]
    checksum = sum_i mix(sums[i] + (i + 1) * PLACE)
    mix(x): x *= MIX_1; x ^= x >> 32; x *= MIX_2; x ^= x >> 29        (shifts keep the sign)

One changed word changes a row's sum and a column's; two that change places do, as long as they differ; so do rows. Two plain sums
of words run at the memory's speed (8 to 10 GB/s on one core, where a product per word reaches half of it; 20 on what a copy has
left in the cache), because nothing is multiplied until the sums are there. What leaves every row's and every column's sum as it
was passes: this finds accidents, it does not stop an adversary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

WIDTH = 1024  # words of a row
ROW_BYTES = 8 * WIDTH
BLOCK_ROWS = 64  # summed both ways while they lie in the cache
BLOCK_ROWS_ON_DEVICES = 1 << 13
PLACE = 0x1E3779B97F4A7C15
MIX_1, MIX_2 = 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


class Checksum:
    """The checksum of a tensor of `num_bytes`, whose bytes come in any order, each once; sums live on `device`.

    `seconds` are what summing took, without copies; on a GPU, only what asking for it took.
    """

    def __init__(self, num_bytes: int, device: torch.device | str = "cpu") -> None:
        self.seconds = 0.0
        self._sums = torch.zeros(WIDTH + -(-num_bytes // ROW_BYTES), dtype=torch.int64, device=device)
        self._columns, self._rows = self._sums[:WIDTH], self._sums[WIDTH:]
        self._of_block = torch.empty(WIDTH, dtype=torch.int64, device=device) if num_bytes >= ROW_BYTES else None

    def add(self, first: int, values: Tensor, source: Tensor | None = None) -> None:
        """Take a flat, contiguous range of the tensor, whose first byte is byte `first` of the tensor.

        With a `source` of the same form its values are copied to `values` on the way, and what then stands there is summed block by
        block, while it is in the cache.
        """
        data, given = values.view(torch.uint8), None if source is None else source.view(torch.uint8)
        to_row = min(-first % ROW_BYTES, len(data))
        end = to_row + (len(data) - to_row) // ROW_BYTES * ROW_BYTES
        if to_row:
            self._add_part(first, data[:to_row], None if given is None else given[:to_row])
        if end > to_row:
            self._add_rows(
                (first + to_row) // ROW_BYTES, data[to_row:end], None if given is None else given[to_row:end]
            )
        if end < len(data):
            self._add_part(first + end, data[end:], None if given is None else given[end:])

    def value(self) -> Tensor:
        began = time.perf_counter()
        mixed = _place_factors(len(self._sums), self._sums.device).add(self._sums).mul_(MIX_1)
        mixed.bitwise_xor_(mixed >> 32).mul_(MIX_2)
        total = mixed.bitwise_xor_(mixed >> 29).sum()
        self.seconds += time.perf_counter() - began
        return total

    def _add_part(self, first: int, data: Tensor, source: Tensor | None) -> None:
        """Bytes within one row."""
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
        """Whole rows, from row `top` on."""
        step = block_rows(data.device)
        if data.storage_offset() % 8 or (source is not None and source.storage_offset() % 8):
            if source is not None:
                data.copy_(source)
            for start in range(0, len(data), step * ROW_BYTES):
                part = data[start : start + step * ROW_BYTES].clone()
                self._add_blocks(top + start // ROW_BYTES, part.view(torch.int64).view(-1, WIDTH), None, step)
            return
        given = None if source is None else source.view(torch.int64).view(-1, WIDTH)
        self._add_blocks(top, data.view(torch.int64).view(-1, WIDTH), given, step)

    def _add_blocks(self, top: int, words: Tensor, source: Tensor | None, step: int) -> None:
        """Sums of rows are the faster ones on what comes from memory (14 against 8 GB/s), those of columns on what a copy left."""
        columns, of_block, clock = self._columns, self._of_block, time.perf_counter
        sums = self._rows[top : top + len(words)].split(step)
        if source is None:
            began = clock()
            for block, rows in zip(words.split(step), sums, strict=True):
                torch.sum(block, 1, out=rows)
                columns.add_(torch.sum(block, 0, out=of_block))
            self.seconds += clock() - began
            return
        for block, given, rows in zip(words.split(step), source.split(step), sums, strict=True):
            block.copy_(given)
            began = clock()
            columns.add_(torch.sum(block, 0, out=of_block))
            torch.sum(block, 1, out=rows)
            self.seconds += clock() - began


def block_rows(device: torch.device) -> int:
    """How much is summed at once: what stays in a core's cache while it is copied and summed, or what keeps a GPU busy."""
    return BLOCK_ROWS if device.type == "cpu" else BLOCK_ROWS_ON_DEVICES


def _place_factors(count: int, device: torch.device) -> Tensor:
    """`(i + 1) * PLACE` for `count` sums; kept, since every tensor needs them."""
    known = _PLACES.get(device)
    if known is None or len(known) < count:
        known = torch.arange(1, 2 * count + 1, device=device).mul_(PLACE)
        _PLACES[device] = known
    return known[:count]


_PLACES: dict[torch.device, Tensor] = {}


def tensor_checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The checksum of a tensor's values in `dtype`, row after row: a strided one is never copied whole."""
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
    """A contiguous tensor's values as one range, whatever strides it has where it is one element long."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _split_flat(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """The values in order, in contiguous flat parts of about `most` bytes that are views where they can be, else small copies."""
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

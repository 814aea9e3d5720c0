"""Checksum of a tensor's bytes that depends on their positions and accepts ranges in any order.

A tensor's bytes, padded with zeros, are 8-byte words in a grid of `WIDTH` columns. The words of each column and of
each row are summed; every sum is mixed with its index, and the mixed values are added, all modulo 2^64:

    sums = [sum_r word[r, c] for each c] + [sum_c word[r, c] for each r]
    checksum = sum_i mix(sums[i] + (i + 1) * PLACE)
    mix(x): x *= MIX_1; x ^= x >> 32; x *= MIX_2; x ^= x >> 29        (shifts keep the sign)

A changed word changes a row's sum and a column's; so does a swap of two different words or rows. Two plain sums of
words run at memory speed (8 to 10 GB/s on one core, 20 on data that a copy left in the cache; one product per word
halves that), because the multiplications happen after the sums. A change that preserves every row's and every
column's sum is not detected: the checksum finds accidents, it does not stop an adversary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

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

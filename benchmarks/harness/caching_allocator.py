"""A model of torch's CUDA caching allocator, fed by the storages that operations on fake tensors make and free."""

from __future__ import annotations

import bisect
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MIB = 1 << 20
_SMALL, _LARGE = 1 * _MIB, 10 * _MIB  # the largest block of a small segment, the least of a segment of its own
_SMALL_SEGMENT, _LARGE_SEGMENT, _ROUNDED = 2 * _MIB, 20 * _MIB, 2 * _MIB
_BLOCK = 512


class CachingAllocator:
    """Segments of the driver, split into blocks that are reused: best fit, neighbours merge, without expandable segments.

    Rules and sizes are those of CUDACachingAllocator.cpp in torch 2.11 to 2.13. `reserved` are the bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved = self.allocated = self.most_allocated = self.mallocs = 0
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # by pool: size, segment, offset
        self._segments: dict[int, dict[int, tuple[int, bool]]] = {}  # offset -> size and whether it is free
        self._pools: dict[int, bool] = {}

    def malloc(self, size: int) -> tuple[int, int]:
        """Return the segment and the offset of a block."""
        size = max(_BLOCK, -(-size // _BLOCK) * _BLOCK)
        small = size <= _SMALL
        pool = self._free[small]
        position = bisect.bisect_left(pool, (size, -1, -1))
        if position == len(pool):
            self._add_segment(size, small)
            position = bisect.bisect_left(pool, (size, -1, -1))
        found, segment, offset = pool.pop(position)
        rest = found - size
        if rest >= _BLOCK if small else rest > _SMALL:
            self._segments[segment][offset + size] = (rest, True)
            bisect.insort(pool, (rest, segment, offset + size))
            found = size
        self._segments[segment][offset] = (found, False)
        self.allocated += found
        self.most_allocated = max(self.most_allocated, self.allocated)
        return segment, offset

    def _add_segment(self, size: int, small: bool) -> None:
        self.mallocs += 1
        whole = _SMALL_SEGMENT if small else _LARGE_SEGMENT if size < _LARGE else -(-size // _ROUNDED) * _ROUNDED
        segment = self.mallocs
        self.reserved += whole
        self._segments[segment], self._pools[segment] = {0: (whole, True)}, small
        bisect.insort(self._free[small], (whole, segment, 0))

    def free(self, block: tuple[int, int]) -> None:
        """Free a block, and merge it with free neighbours."""
        segment, offset = block
        blocks, pool = self._segments[segment], self._free[self._pools[segment]]
        size, _ = blocks[offset]
        self.allocated -= size
        following = blocks.get(offset + size)
        if following is not None and following[1]:
            pool.remove((following[0], segment, offset + size))
            del blocks[offset + size]
            size += following[0]
        before = max((other for other in blocks if other < offset), default=None)
        if before is not None and blocks[before][1]:
            pool.remove((blocks[before][0], segment, before))
            del blocks[offset]
            size, offset = size + blocks[before][0], before
        blocks[offset] = (size, True)
        bisect.insort(pool, (size, segment, offset))

    def empty_cache(self) -> None:
        """Return all segments without used blocks to the driver."""
        for segment in [each for each, blocks in self._segments.items() if len(blocks) == 1 and blocks[0][1]]:
            size, _ = self._segments.pop(segment)[0]
            self._free[self._pools.pop(segment)].remove((size, segment, 0))
            self.reserved -= size


class AllocatedFakes(TorchDispatchMode):
    """Gives each storage that an operation returns a block of a CachingAllocator until it is freed; enter it in fake mode."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()
        self._allocator, self._known = allocator, set[int]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and storage.nbytes():
            self._known.add(key)
            weakref.finalize(storage, self._forget, key, self._allocator.malloc(storage.nbytes()))

    def _forget(self, key: int, block: tuple[int, int]) -> None:
        self._known.discard(key)
        self._allocator.free(block)

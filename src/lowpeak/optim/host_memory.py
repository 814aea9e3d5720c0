"""Host memory beside a device: gradients are added there as backward forms them, and states visit the device in a step.

Copies run on separate streams beside the device's computation. A thread adds arrived gradients to their sums, in the order in which
they were formed: the sums are the same in every run. On a CPU, whose memory is the host's, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from lowpeak.memory import empty_page_locked
from lowpeak.optim.formats import TensorStep

PIECE = 1 << 24  # values that are copied at a time
_SCRATCH = 1 << 16  # values that are converted at a time
NUM_PIECES = 2  # copies under way: while one piece is computed or added, the next one is copied


class HostMemory:
    """Buffers in host memory that gradients of one device are added to, and whose contents visit the device.

    `num_pieces` of `piece` values are under way at a time.

        total = host.zeros(size, torch.float32)
        host.add(total, gradient)                                    # begins the copy; the gradient may be freed
        host.wait_for_sums()                                         # before `total` is read
        host.visit(step, update, factor)                             # for each tensor of the step
        host.join()                                                  # later computations of the device wait for the visits
        host.synchronize()                                           # the host waits, to read or save the states
    """

    def __init__(self, device: torch.device) -> None:
        self.piece, self.num_pieces = PIECE, NUM_PIECES
        self._device = device
        self._slots = [_Slot(device, self.piece) for _ in range(NUM_PIECES)] if device.type != "cpu" else []
        self._next = cycle(self._slots)
        self._factor: Tensor | None = None

    @cached_property
    def _adder(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "gradient sums")

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a page-locked buffer of zeros."""
        return self.empty(size, dtype).zero_()

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a page-locked buffer: copies to and from it run beside the computation."""
        return empty_page_locked(size, dtype, self._device)

    def add(self, total: Tensor, values: Tensor, overwrite: bool = False) -> None:
        """Begin to add the device's flat values to a sum in host memory, or `overwrite` it."""
        if not self._slots:
            add_on_host(total, values, overwrite)
            return
        for first in range(0, values.numel(), self.piece):
            piece, slot = slice(first, first + self.piece), next(self._next)
            arriving = slot.receive(values[piece])
            slot.added = self._adder.submit(slot.add, total[piece], arriving, overwrite)

    def add_rows(self, total_VD: Tensor, ids_N: Tensor, values_ND: Tensor) -> None:
        """Begin to add each row of `values` to the row of its id in a sum in host memory."""
        if not self._slots:
            _add_rows(total_VD, ids_N, values_ND)
            return
        num_rows = max(1, self.piece // values_ND.shape[1])
        for first in range(0, len(ids_N), num_rows):
            rows, slot = slice(first, first + num_rows), next(self._next)
            arriving = slot.receive(values_ND[rows].reshape(-1)).view(-1, values_ND.shape[1])
            arriving_ids = slot.copy(ids_N[rows], torch.empty(len(arriving), dtype=ids_N.dtype, pin_memory=True))
            slot.added = self._adder.submit(slot.add_rows, total_VD, arriving_ids, arriving)

    def wait_for_sums(self) -> None:
        """Wait until all gradients are added; raise an error of an addition."""
        for slot in self._slots:
            slot.wait_for_addition()

    def synchronize(self) -> None:
        """Wait until all gradients are added and all visits are over."""
        for slot in self._slots:
            slot.synchronize()

    def multiply(self, total: Tensor, factor: Tensor) -> Tensor | None:
        """Multiply a sum by a factor; if it will visit the device, return the factor for `visit`, which is cheaper."""
        if self._slots:
            return factor
        total.mul_(factor.to(total.device))
        return None

    def visit(self, step: TensorStep, update: Callable[[TensorStep], None], factor: Tensor | None) -> None:
        """Run a tensor's step on the device, whose states and gradients are in host memory, piece by piece.

        Call `join` after the last tensor of a step: until then pieces of the next tensor are copied during the update.
        """
        if not self._slots:
            update(step)
            return
        # Other streams read it until `join`.
        self._factor = factor
        pieces = step.tensor.chunks(self.piece)
        for (first, last), slot in zip(pieces, self._next, strict=False):
            here = step.slice(first, last)
            with slot.begin():
                there = copy_to_device(here, self._device)
                if factor is not None:
                    there.gradients.mul_(factor)
                update(there)
                for key, values in there.tensor.state.items():
                    here.tensor.state[key].copy_(values, non_blocking=True)

    def join(self) -> None:
        """Let later computations of the device wait for all visits."""
        for slot in self._slots:
            slot.join()
        self._factor = None


class _Slot:
    """A stream of a device, and a page-locked buffer that gradients pass through."""

    def __init__(self, device: torch.device, piece: int) -> None:
        self._device, self._piece = device, piece
        self._torch = torch.get_device_module(device)
        self._stream = self._torch.Stream(device)
        self.added: Future[None] | None = None  # the addition that reads the buffer

    @cached_property
    def _buffer(self) -> Tensor:
        return torch.empty(self._piece * 4, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> AbstractContextManager[Any]:
        """Return a context in which operations run on this stream, after those of the current one."""
        self._stream.wait_stream(self._torch.current_stream(self._device))
        return self._torch.stream(self._stream)

    def join(self) -> None:
        """Let later computations of the device wait for this stream."""
        self._torch.current_stream(self._device).wait_stream(self._stream)

    def receive(self, values: Tensor) -> Tensor:
        """Begin to copy flat values of the device into the buffer, and return them there; the caller may free them."""
        self.wait_for_addition()
        return self.copy(values, self._buffer[: values.numel() * values.element_size()].view(values.dtype))

    def copy(self, values: Tensor, host: Tensor) -> Tensor:
        """Begin to copy values of the device into page-locked memory, and return it."""
        with self.begin():
            host.copy_(values, non_blocking=True)
        # The allocator must not reuse this memory until the copy is done.
        values.record_stream(self._stream)
        return host

    def add(self, total: Tensor, arriving: Tensor, overwrite: bool) -> None:
        """Add values to a sum when they have arrived."""
        self._stream.synchronize()
        add_on_host(total, arriving, overwrite)

    def add_rows(self, total_VD: Tensor, ids_N: Tensor, arriving_ND: Tensor) -> None:
        """Add rows to a sum when they have arrived."""
        self._stream.synchronize()
        _add_rows(total_VD, ids_N, arriving_ND)

    def wait_for_addition(self) -> None:
        """Wait until the buffer is free; raise an error of its addition once."""
        added, self.added = self.added, None
        if added is not None:
            added.result()

    def synchronize(self) -> None:
        """Wait for the stream and the addition."""
        self._stream.synchronize()
        self.wait_for_addition()


def copy_to_device(step: TensorStep, device: torch.device) -> TensorStep:
    """Return a step whose states and gradients are copies on the device; its weights are there already."""

    def copy(values: Tensor) -> Tensor:
        return torch.empty(values.shape, dtype=values.dtype, device=device).copy_(values, non_blocking=True)

    state = {key: copy(values) for key, values in step.tensor.state.items()}
    return replace(step, tensor=replace(step.tensor, state=state), gradients=copy(step.gradients))


def add_on_host(total: Tensor, values: Tensor, overwrite: bool) -> None:
    """Add values to a sum on a CPU, or `overwrite` the sum with them.

    Convert narrower values to fp32 in cache-sized parts: the same bits, several times faster than torch's mixed addition.
    """
    if overwrite:
        total.copy_(values)
    elif values.dtype == total.dtype or total.dtype != torch.float32:
        total.add_(values)
    else:
        scratch = total.new_empty(min(_SCRATCH, total.numel()))
        for part, added in zip(total.split(_SCRATCH), values.split(_SCRATCH), strict=True):
            part.add_(scratch[: len(added)].copy_(added))


def _add_rows(total_VD: Tensor, ids_N: Tensor, values_ND: Tensor) -> None:
    total_VD.index_add_(0, ids_N, values_ND.to(total_VD.dtype))

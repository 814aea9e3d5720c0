"""Activation offloading: tensors that a forward saves for its backward are moved to host memory.

With activation checkpointing these are the layers' inputs: layers x tokens x hidden numbers. They pass through
`torch.autograd.graph.saved_tensors_hooks` in the forward and again in the backward. Small tensors, and parameters and their
views, stay on the device. Tensors that share a storage share one host copy.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LEAST_BYTES = 1 << 16  # of a storage: smaller ones are not worth a copy
COPIES_UNDER_WAY = 2  # copies to the host


class AsyncHostMover:
    """Copies flat bytes between `device` and pinned host memory, on a separate stream, during the computation.

    At most two copies to the host are under way. Their tensors are kept until the computing stream waits for them, so that torch's
    allocator can reuse the memory in the order of that stream. With `record_stream` it would wait for the device in place of that:
    a host that runs ahead takes new memory for each layer.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._torch = torch.get_device_module(self.device)
        self._stream = self._torch.Stream(self.device)
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        self._arriving: dict[int, tuple[Tensor, Any]] = {}

    def to_host(self, flat: Tensor) -> Tensor:
        """Begin to copy `flat` to host memory, and return the copy; the caller may drop `flat` at once."""
        for unused, _ in list(self._arriving.values()):  # prefetched for a graph that was dropped
            self.wait(unused)
        self._finish_copies(COPIES_UNDER_WAY - 1)
        host = self.empty_on_host(flat)
        self._leaving.append((flat, self._copy(flat, host)))
        return host

    def to_device(self, host: Tensor) -> Tensor:
        """Begin to copy `host` to the device, and return the copy; it may be used after `wait`."""
        self._finish_copies(0)
        flat = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        self._arriving[id(flat)] = (flat, self._copy(host, flat))
        return flat

    def wait(self, flat: Tensor) -> None:
        """Make later computations wait until the copy to the device `flat` is complete."""
        _, event = self._arriving.pop(id(flat), (None, None))
        if event is not None:
            self._torch.current_stream(self.device).wait_event(event)

    def empty_on_host(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        """Copy on the separate stream, after the computing stream's present work; return the event of its end."""
        self._stream.wait_stream(self._torch.current_stream(self.device))
        with self._torch.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _finish_copies(self, most: int) -> None:
        """Let the computing stream wait until at most so many copies to the host are under way; drop their tensors."""
        while len(self._leaving) > most:
            _, event = self._leaving.popleft()
            self._torch.current_stream(self.device).wait_event(event)


class _HostCopy:
    """A storage in host memory, the `number`-th that was saved; `on_device` while it is in use or prefetched."""

    def __init__(self, host: Tensor, version: int, number: int) -> None:
        self.host, self.version, self.number = host, version, number
        self.on_device: Tensor | None = None


@dataclass(frozen=True)
class _Handle:
    """A saved tensor, as a view of an offloaded storage."""

    storage: _HostCopy
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class ActivationOffload:
    """Offloads a forward's activations: `with offload.saving(): loss = ...`, then `loss.backward()`.

    Values and gradients are the same, bit by bit, as without it. The total of copied bytes is counted. In the backward, while
    one storage is used, the one saved before it is prefetched: two are on the device at a time.
    """

    def __init__(self, model: nn.Module, mover: AsyncHostMover, least_bytes: int = LEAST_BYTES) -> None:
        self.offloaded_bytes = 0
        self._model = model
        self._mover = mover
        self._least_bytes = least_bytes

    @contextmanager
    def saving(self) -> Iterator[None]:
        session = _Session(self, self._mover, _storage_addresses(self._model), self._least_bytes)
        with torch.autograd.graph.saved_tensors_hooks(session.pack, session.unpack):
            yield


class _Session:
    """The hooks of one forward and its backward; the graph's saved tensors keep it alive."""

    def __init__(self, owner: ActivationOffload, mover: AsyncHostMover, kept: frozenset[int], least_bytes: int) -> None:
        self._owner, self._mover, self._kept, self._least_bytes = owner, mover, kept, least_bytes
        # By the address of a storage, until it is freed. A host copy is freed when no saved tensor needs it.
        self._copies: dict[int, tuple[weakref.ref[torch.UntypedStorage], weakref.ref[_HostCopy]]] = {}
        self._order: list[weakref.ref[_HostCopy]] = []
        self._used: _HostCopy | None = None
        self._prefetched: _HostCopy | None = None

    def pack(self, tensor: Tensor) -> Tensor | _Handle:
        """Return a handle that replaces the tensor, or the tensor itself if it stays on the device."""
        if not self._is_offloaded(tensor):
            return tensor
        tensor = tensor.detach()
        offset = int(tensor.storage_offset())
        return _Handle(self._copy_of(tensor), tensor.dtype, tuple(tensor.size()), tensor.stride(), offset)

    def unpack(self, saved: Tensor | _Handle) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        flat = self._load(saved.storage)
        self._prefetch_before(saved.storage)
        return flat.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def _is_offloaded(self, tensor: Tensor) -> bool:
        """Return whether a tensor is plain, dense, on the device, large and not a view of a parameter."""
        # The storage of a tensor made of others (distributed, quantized) does not hold its data.
        plain = tensor.layout is torch.strided and not hasattr(type(tensor), "__tensor_flatten__")
        if not plain or tensor.device != self._mover.device:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._least_bytes and storage._cdata not in self._kept

    def _copy_of(self, tensor: Tensor) -> _HostCopy:
        """Return the host copy of the tensor's storage; a new one if the storage was modified since."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._copies[key][1]() if key in self._copies else None
        if known is not None and known.version == tensor._version:
            return known
        flat = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8)
        copy = _HostCopy(self._mover.to_host(flat), tensor._version, len(self._order))
        self._owner.offloaded_bytes += flat.numel()
        freed = weakref.ref(storage, lambda _: self._copies.pop(key, None))
        self._copies[key] = (freed, weakref.ref(copy))
        self._order.append(weakref.ref(copy))
        return copy

    def _load(self, storage: _HostCopy) -> Tensor:
        """Return the storage's bytes on the device, and free those of the one used before."""
        if storage.on_device is None:
            storage.on_device = self._mover.to_device(storage.host)
        self._mover.wait(storage.on_device)
        if self._used is not None and self._used is not storage:
            self._used.on_device = None
        if self._prefetched is storage:
            self._prefetched = None
        self._used = storage
        return storage.on_device

    def _prefetch_before(self, storage: _HostCopy) -> None:
        """Begin to load the storage that was saved before this one, unless one is being prefetched.

        A backward needs the saved tensors in reverse order.
        """
        before = self._order[storage.number - 1]() if storage.number else None
        if self._prefetched is None and before is not None and before.on_device is None:
            before.on_device = self._mover.to_device(before.host)
            self._prefetched = before


def _storage_addresses(model: nn.Module) -> frozenset[int]:
    tensors: Sequence[Tensor] = [*model.parameters(), *model.buffers()]
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)

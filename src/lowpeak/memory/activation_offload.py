"""Activation offload: what a forward saves for its backward waits in host memory, a storage at a time.

With activation checkpointing on, what is saved are the layers' inputs: layers x tokens x hidden numbers leave the
device. `torch.autograd.graph.saved_tensors_hooks` hands each saved tensor over in the forward and asks for it in the
backward. Small tensors and (views of) parameters stay where they are; views of one storage share one copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowpeak.memory.device_memory import with_index

LEAST_BYTES = 1 << 16  # of a storage: a copy of less takes longer than it is worth


class DeviceMover:
    """How flat bytes leave `device` for pinned host memory and come back: on a separate stream, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = with_index(device)
        self._torch = torch.get_device_module(self.device)
        self._stream = self._torch.Stream(self.device)

    def away(self, flat: Tensor) -> Tensor:
        """Return a copy of `flat` in host memory; the caller may drop `flat` at once."""
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._stream.wait_stream(self._torch.current_stream(self.device))
        with self._torch.stream(self._stream):
            host.copy_(flat, non_blocking=True)
        flat.record_stream(self._stream)  # the allocator keeps its memory until the copy is done
        return host

    def back(self, host: Tensor) -> Tensor:
        """Begin to copy `host` to the device; the answer may be used after `wait`."""
        flat = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        self._stream.wait_stream(self._torch.current_stream(self.device))  # the memory may have been in use until now
        with self._torch.stream(self._stream):
            flat.copy_(host, non_blocking=True)
        flat.record_stream(self._stream)
        return flat

    def wait(self, flat: Tensor) -> None:
        """Let what is computed from now on wait until `flat`, an answer of `back`, is there."""
        self._torch.current_stream(self.device).wait_stream(self._stream)


class _Away:
    """One storage in host memory, the `number`-th that was saved; on the device while it is used or about to be."""

    def __init__(self, host: Tensor, version: int, number: int) -> None:
        self.host, self.version, self.number = host, version, number
        self.here: Tensor | None = None


@dataclass(frozen=True)
class _Handle:
    """A saved tensor as a view of a storage that is away."""

    storage: _Away
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class ActivationOffload:
    """Saves a forward's activations in host memory: `with offload.saving(): loss = ...`, then `loss.backward()`.

    Same values and gradients, bit by bit, as without it. `bytes_away` counts what has been copied to the host. While one
    storage is used in the backward, the one that was saved before it is on its way: two are on the device at a time.
    """

    def __init__(self, model: nn.Module, mover: DeviceMover, least_bytes: int = LEAST_BYTES) -> None:
        self.bytes_away = 0
        self._model = model
        self._mover = mover
        self._least_bytes = least_bytes

    @contextmanager
    def saving(self) -> Iterator[None]:
        session = _Session(self, self._mover, _storages(self._model), self._least_bytes)
        with torch.autograd.graph.saved_tensors_hooks(session.pack, session.unpack):
            yield


class _Session:
    """One forward and its backward. It lives as long as the graph, whose saved tensors refer to it."""

    def __init__(self, owner: ActivationOffload, mover: DeviceMover, kept: frozenset[int], least_bytes: int) -> None:
        self._owner, self._mover, self._kept, self._least_bytes = owner, mover, kept, least_bytes
        # A weak reference to a storage keeps its address from being given to another one. What no saved tensor needs
        # any more leaves host memory at once.
        self._known: weakref.WeakValueDictionary[StorageWeakRef, _Away] = weakref.WeakValueDictionary()
        self._order: list[weakref.ref[_Away]] = []
        self._used: _Away | None = None
        self._ahead: _Away | None = None

    def pack(self, tensor: Tensor) -> Tensor | _Handle:
        """Return a handle in the tensor's place, or the tensor itself if it stays."""
        if not self._moves(tensor):
            return tensor
        tensor = tensor.detach()
        offset = int(tensor.storage_offset())
        return _Handle(self._away(tensor), tensor.dtype, tuple(tensor.size()), tensor.stride(), offset)

    def unpack(self, saved: Tensor | _Handle) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        flat = self._here(saved.storage)
        self._begin_before(saved.storage)
        return flat.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def _moves(self, tensor: Tensor) -> bool:
        """Return whether a tensor leaves: plain, dense, on the device, large enough and no part of a parameter."""
        # A tensor made of others (distributed, quantized) has a storage that says nothing.
        plain = tensor.layout is torch.strided and not hasattr(type(tensor), "__tensor_flatten__")
        if not plain or tensor.device != self._mover.device:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._least_bytes and storage._cdata not in self._kept

    def _away(self, tensor: Tensor) -> _Away:
        """Return the host copy of the tensor's storage; a new one if the storage was written to since."""
        key = StorageWeakRef(tensor.untyped_storage())
        found = self._known.get(key)
        if found is not None and found.version == tensor._version:
            return found
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        made = _Away(self._mover.away(flat), tensor._version, len(self._order))
        self._owner.bytes_away += flat.numel()
        self._known[key] = made
        self._order.append(weakref.ref(made))
        return made

    def _here(self, storage: _Away) -> Tensor:
        """Return the storage's bytes on the device; those of the one that was used before it are let go."""
        if storage.here is None:
            storage.here = self._mover.back(storage.host)
        self._mover.wait(storage.here)
        if self._used is not None and self._used is not storage:
            self._used.here = None
        if self._ahead is storage:
            self._ahead = None
        self._used = storage
        return storage.here

    def _begin_before(self, storage: _Away) -> None:
        """Start to bring the storage that was saved before this one: a backward asks in reverse order. One at a time."""
        before = self._order[storage.number - 1]() if storage.number else None
        if self._ahead is None and before is not None and before.here is None:
            before.here = self._mover.back(before.host)
            self._ahead = before


def _storages(model: nn.Module) -> frozenset[int]:
    tensors: Sequence[Tensor] = [*model.parameters(), *model.buffers()]
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)

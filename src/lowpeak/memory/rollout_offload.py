"""Rollout offloading: optimizer states, gradients and frozen models are in host memory while completions are generated.

A storage is copied to the host and resized to zero on the device; afterwards it is resized back and filled. Tensors and views
on it (FSDP2's shards, parts of DeepSpeed's flat buffers) stay valid objects, so no parallel strategy has to know. They must
not be read in between.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lowpeak.errors import MemoryExhaustedError, first_line
from lowpeak.memory.device_memory import is_out_of_memory

logger = logging.getLogger(__name__)

LEAST_BYTES = 1 << 16  # of a storage: step counts and scales stay on the device

Tensors = Callable[[], Iterable[Tensor]]


class HostMover:
    """Copies flat bytes between `device` and pinned host memory, on the computing stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._torch = torch.get_device_module(self.device)

    def to_host(self, flat: Tensor) -> Tensor:
        """Begin to copy `flat` to the host, and return the copy; `flat` may be freed at once."""
        # The copy precedes, on its stream, any kernel that could get the freed memory.
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        host.copy_(flat, non_blocking=True)
        return host

    def to_device(self, host: Tensor, flat: Tensor) -> None:
        """Begin to copy `host` into `flat`."""
        flat.copy_(host, non_blocking=True)

    def synchronize(self) -> None:
        """Wait for all copies, and release freed memory to the device's other users (an engine's pool)."""
        self._torch.synchronize(self.device)
        self._torch.empty_cache()


class RolloutOffloader:
    """Moves tensors to the host for a rollout, and back.

    `offloadable` returns the tensors to offload. `needed` returns those that generating needs: a storage of theirs is never moved,
    even if an offloadable tensor shares it. Bytes and seconds (both directions) are counted until they are read.
    """

    def __init__(self, mover: HostMover, needed: Tensors, offloadable: Tensors, least_bytes: int = LEAST_BYTES) -> None:
        self._mover, self._needed, self._least_bytes = mover, needed, least_bytes
        self._offloadable: list[Tensors] = [offloadable]
        self._offloaded: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}  # by address, with the copy on the host
        self.offloaded_bytes = 0
        self.seconds = 0.0

    def add(self, offloadable: Tensors) -> None:
        self._offloadable.append(offloadable)

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Keep the offloadable tensors on the host during the block.

        Raises MemoryExhaustedError if the host has no room for them, or the device has none when they return.
        """
        try:
            self._offload(tensor for offloadable in self._offloadable for tensor in offloadable())
            yield
        except BaseException:
            # Return as many as there is room for; a second error must not hide the first.
            try:
                self._return(tuple(self._offloaded))
            except Exception as error:
                logger.warning("After an error, %d tensors stay on the host: %s", len(self._offloaded), error)
            raise
        self._return(tuple(self._offloaded))

    @contextmanager
    def on_device(self, tensors: Tensors) -> Iterator[None]:
        """Keep these tensors on the device during the block; those that were offloaded are offloaded again after it."""
        keys = tuple(key for key in _storages(tensors()) if key in self._offloaded)
        self._return(keys)
        try:
            yield
        finally:
            if keys:
                self._offload(tensors())

    def pop_usage(self) -> tuple[int, float]:
        """Return and reset the bytes that were offloaded and the seconds that both directions took."""
        taken, self.offloaded_bytes, self.seconds = (self.offloaded_bytes, self.seconds), 0, 0.0
        return taken

    def _offload(self, tensors: Iterable[Tensor]) -> None:
        start = time.perf_counter()
        self._mover.synchronize()
        needed = _storages(self._needed())
        for key, storage in _storages(tensors).items():
            if key not in needed and self._can_move(storage):
                with _explain_oom("the host has no memory left for the offloaded tensors"):
                    self._offloaded[key] = storage, self._mover.to_host(_bytes(storage))
                self.offloaded_bytes += storage.nbytes()
                storage.resize_(0)
        self._mover.synchronize()
        self.seconds += time.perf_counter() - start

    def _can_move(self, storage: torch.UntypedStorage) -> bool:
        is_on_device = storage.device == self._mover.device
        return is_on_device and storage.nbytes() >= self._least_bytes and storage.resizable()

    def _return(self, keys: Iterable[int]) -> None:
        start = time.perf_counter()
        for key in keys:
            storage, host = self._offloaded[key]
            message = (
                "the device has no memory left for the offloaded tensors: give the engine less memory, or let it sleep"
            )
            with _explain_oom(message):
                storage.resize_(host.numel())
            self._mover.to_device(host, _bytes(storage))
            del self._offloaded[key]
        self._mover.synchronize()
        self.seconds += time.perf_counter() - start


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of tensors by address; of a distributed tensor that of its local shard."""
    storages = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.layout is torch.strided and not hasattr(type(local), "__tensor_flatten__"):
            storage = local.untyped_storage()
            storages[storage._cdata] = storage
    return storages


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def _explain_oom(message: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryExhaustedError(f"offload_during_rollout: {message}. ({first_line(error)})") from error

"""What a rollout does not need waits in host memory: optimizer states, gradients, frozen models.

A storage is copied to the host and shrunk to nothing on the device, and grown and filled again afterwards. So whoever holds a
tensor on it, or a view into it (a shard of FSDP2's, a part of DeepSpeed's flat buffers), still holds it, and nothing of any
strategy has to be told. In between nobody may read it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lowpeak.errors import MemoryExhaustedError, first_line
from lowpeak.memory.device_memory import is_exhaustion, with_index

logger = logging.getLogger(__name__)

LEAST_BYTES = 1 << 16  # of a storage: step counts and scales stay

Tensors = Callable[[], Iterable[Tensor]]


class HostMover:
    """How flat bytes leave `device` for pinned host memory and come back: by copies on the computing stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = with_index(device)
        self._torch = torch.get_device_module(self.device)

    def away(self, flat: Tensor) -> Tensor:
        """Begin to copy `flat` to the host; `flat` may be freed at once."""
        # Ordered on the stream before whatever may get the freed memory next.
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        host.copy_(flat, non_blocking=True)
        return host

    def back(self, host: Tensor, flat: Tensor) -> None:
        """Begin to copy `host`, an answer of `away`, into `flat`."""
        flat.copy_(host, non_blocking=True)

    def settle(self) -> None:
        """Return when all copies are done and freed memory is free for everybody on the device, an engine's pool among them."""
        self._torch.synchronize(self.device)
        self._torch.empty_cache()


class Rest:
    """Tensors that rest on the host during a rollout.

    `needed` are the policy's own, on whose storages nothing is touched; `idle` gives what leaves. `bytes_away` and `seconds`
    (both ways) count since the last `take`.
    """

    def __init__(self, mover: HostMover, needed: Tensors, idle: Tensors, least_bytes: int = LEAST_BYTES) -> None:
        self._mover, self._needed, self._least_bytes = mover, needed, least_bytes
        self._idle: list[Tensors] = [idle]
        self._left: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self.bytes_away = 0
        self.seconds = 0.0

    def add(self, idle: Tensors) -> None:
        self._idle.append(idle)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Keep what is idle away in the block; MemoryExhaustedError if the host cannot take it, or it cannot come back."""
        try:
            self._leave(tensor for idle in self._idle for tensor in idle())
            yield
        except BaseException:
            try:  # as much as there is room for; what goes wrong here must not hide the error that is under way
                self._return(tuple(self._left))
            except Exception as error:
                logger.warning("After an error, %d tensors stay on the host: %s", len(self._left), error)
            raise
        self._return(tuple(self._left))

    @contextmanager
    def here(self, tensors: Tensors) -> Iterator[None]:
        """Keep these on the device in the block; those of them that were away leave again after it."""
        keys = tuple(key for key in _storages(tensors()) if key in self._left)
        self._return(keys)
        try:
            yield
        finally:
            if keys:
                self._leave(tensors())

    def take(self) -> tuple[int, float]:
        """Return the bytes that left, and the seconds that leaving and coming back took, since the last call."""
        taken, self.bytes_away, self.seconds = (self.bytes_away, self.seconds), 0, 0.0
        return taken

    def _leave(self, tensors: Iterable[Tensor]) -> None:
        start = time.perf_counter()
        self._mover.settle()
        needed = _storages(self._needed())
        for key, storage in _storages(tensors).items():
            if key not in needed and self._moves(storage):
                with _explained("the host has no room for what leaves the device"):
                    self._left[key] = storage, self._mover.away(_bytes(storage))
                self.bytes_away += storage.nbytes()
                storage.resize_(0)
        self._mover.settle()
        self.seconds += time.perf_counter() - start

    def _moves(self, storage: torch.UntypedStorage) -> bool:
        here = storage.device == self._mover.device
        return here and storage.nbytes() >= self._least_bytes and storage.resizable()

    def _return(self, keys: Iterable[int]) -> None:
        start = time.perf_counter()
        for key in keys:
            storage, host = self._left[key]
            with _explained("what left the device has no room to come back: give the engine less, or let it sleep"):
                storage.resize_(host.numel())
            self._mover.back(host, _bytes(storage))
            del self._left[key]
        self._mover.settle()
        self.seconds += time.perf_counter() - start


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of tensors, each once; of a distributed tensor that of its local shard."""
    found = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.layout is torch.strided and not hasattr(type(local), "__tensor_flatten__"):
            storage = local.untyped_storage()
            found[storage._cdata] = storage
    return found


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_exhaustion(error):
            raise
        raise MemoryExhaustedError(f"offload_during_rollout: {what}. ({first_line(error)})") from error

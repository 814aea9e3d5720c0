"""Page-locked host memory: copies between it and a device run while both compute."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_PAGE = 4096  # bytes


def empty_page_locked(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat buffer that `device` copies from and to without the host waiting; for a CPU, plain memory.

    On CUDA it is locked while the returned tensor lives: views of it do not keep the lock.
    """
    if device.type != "cuda":
        return torch.empty(size, dtype=dtype, pin_memory=device.type != "cpu")
    # Whole pages: neighbouring buffers must not share one.
    num_bytes = -(-size * dtype.itemsize // _PAGE) * _PAGE
    raw = torch.empty(num_bytes + _PAGE, dtype=torch.uint8)
    pages = raw[-raw.data_ptr() % _PAGE :][:num_bytes]
    buffer = pages.view(dtype)[:size]
    if num_bytes and not _lock(pages, buffer):
        # The failed call left an error behind, which the next kernel would raise.
        with suppress(RuntimeError):
            torch.zeros(1, device=device)
        _warn_once()
    return buffer


def _lock(pages: Tensor, owner: Tensor) -> bool:
    """Lock memory for CUDA until its owner is freed; torch's pinned memory would round its size up to a power of two."""
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(pages.data_ptr(), pages.nbytes, 0)) != 0:
        return False
    weakref.finalize(owner, cudart.cudaHostUnregister, pages.data_ptr())
    return True


@cache
def _warn_once() -> None:
    logger.warning("Host memory cannot be page-locked, so copies between it and the device are slower.")

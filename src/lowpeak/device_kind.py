"""The kind of device whose code runs: that of a tensor, or in a rehearsal the planned one.

Fake tensors are on the CPU. Where CUDA's code allocates other memory than a CPU's, a rehearsal must choose it explicitly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_rehearsed: ContextVar[str | None] = ContextVar("rehearsed_device_kind", default=None)


def device_kind(device: Any) -> str:
    """Return "cpu", "cuda" or another type of a torch.device; inside `rehearse_device` the rehearsed one."""
    return _rehearsed.get() or str(device.type)


def widest_float(device: Any) -> torch.dtype:
    """Return the widest floating-point type of a device: float64, and float32 on Apple's GPUs, which lack it."""
    return torch.float32 if device_kind(device) == "mps" else torch.float64


@contextmanager
def rehearse_device(kind: str) -> Iterator[None]:
    """Run the code of devices of this kind in the block, on fake tensors of a CPU."""
    token = _rehearsed.set(kind)
    try:
        yield
    finally:
        _rehearsed.reset(token)

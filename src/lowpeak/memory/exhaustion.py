"""Whether an error says that memory ran out."""

from __future__ import annotations

import torch


def is_exhaustion(error: Exception) -> bool:
    """True for torch's and Python's own errors, and for a CPU's allocator, which raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)

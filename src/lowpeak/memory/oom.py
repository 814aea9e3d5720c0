"""Whether an error says that memory ran out."""

from __future__ import annotations

import torch

# A CPU's allocator; CUDA where torch's allocator did not ask, pinned memory among it; cuBLAS, cuDNN and their kin.
_SIGNS = ("can't allocate memory", "CUDA error: out of memory", "_ALLOC_FAILED")


def is_exhaustion(error: Exception) -> bool:
    """True for torch's and Python's own errors, and for plain ones of allocators and libraries that say so."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in _SIGNS)

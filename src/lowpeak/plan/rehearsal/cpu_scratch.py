"""Memory that operations on a CPU allocate and free internally, which a meter of tensors cannot see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CpuScratch:
    """Bytes that operations on a CPU allocate and free internally: collectives of gloo, and kernels that widen their inputs.

    gloo copies an all-gather's result once at start and once in one of two worker threads: at most three copies exist. A
    reduce-scatter works on a copy of its input. A norm in a wider dtype takes a copy in it; a sum of two dtypes takes copies of
    the narrow input and of the result.
    """

    def __init__(self) -> None:
        self._in_a_row: list[int] = []

    def __call__(self, func: Any, args: Any, kwargs: Any) -> int:
        c10d = torch.ops.c10d
        if func is c10d._allgather_base_.default:
            size, in_threads = int(args[0].nbytes), sum(sorted(self._in_a_row)[-2:])
            self._in_a_row.append(size)
            return size + in_threads
        if func.namespace in ("aten", "fsdp") and not (func.is_view or func is torch.ops.aten._to_copy.default):
            self._in_a_row.clear()
        if func is c10d._reduce_scatter_base_.default:
            return int(args[1].nbytes)
        return _widening_bytes(func, args, kwargs)


def _widening_bytes(func: Any, args: Any, kwargs: Any) -> int:
    aten = torch.ops.aten
    if func is aten.linalg_vector_norm.default:
        dtype = kwargs.get("dtype") or args[0].dtype
        return 0 if dtype == args[0].dtype else int(args[0].numel()) * int(dtype.itemsize)
    if func is aten.add_.Tensor and isinstance(args[1], Tensor) and args[1].dim():
        wide = torch.promote_types(args[0].dtype, args[1].dtype)
        return 0 if wide == args[0].dtype else 2 * int(args[0].numel()) * int(wide.itemsize)
    return 0

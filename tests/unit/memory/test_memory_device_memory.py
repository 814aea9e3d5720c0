"""Which errors say that memory ran out."""

from __future__ import annotations

import torch

from lowpeak.memory import is_exhaustion

RAN_OUT = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
)
OTHERS = (RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("batch is out of range"))


def test_what_allocators_and_libraries_say_is_known():
    assert [error for error in (*RAN_OUT, *OTHERS) if is_exhaustion(error)] == list(RAN_OUT)

"""Free memory, and errors that mean that it ran out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowpeak.errors import EngineError, LostEngineError, MemoryExhaustedError, RankError
from lowpeak.memory.device_memory import (
    allow_cudnn_attention,
    cap_allocator,
    cgroup_headrooms,
    is_out_of_memory,
)
from lowpeak.ranks import nccl_memory_error

RAN_OUT = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 MiB."),
    MemoryError(),
    MemoryExhaustedError("a phase"),
    EngineError("vLLM's worker failed in lowpeak_begin: OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB"),
    *map(RuntimeError, (
        "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:119",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "HIP error: out of memory",
        "InductorError: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        "miopenStatusAllocFailed",
        "Error: CUDA_ERROR_OUT_OF_MEMORY",
        "hipErrorOutOfMemory",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    )),
)  # fmt: skip
NCCL = tuple(
    RuntimeError(
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.29.7\n"
        f"ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n{last}"
    )
    for last in ("Cuda failure 2 'out of memory'", "Failed to CUDA calloc async 1920 bytes")
)
OTHERS = (
    torch.OutOfMemoryError("out of resource: triton_tem_fused_0 Required: 152064 Hardware limit:101376"),
    RankError("on rank 1, so all ranks stop: OutOfMemoryError: CUDA out of memory"),
    LostEngineError("the server is gone: CUDA out of memory"),
    ValueError("the completion ran out of memory budget"),
    FileNotFoundError("/data/out of memory/rows.jsonl"),
    *map(RuntimeError, (
        "out of resource: shared memory, Required: 148224, Hardware limit: 101376. Reducing block sizes may help.",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
        "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error",
    )),
)  # fmt: skip


def test_out_of_memory_errors_of_allocators_and_libraries_are_recognized():
    assert [error for error in (*RAN_OUT, *NCCL, *OTHERS) if is_out_of_memory(error)] == list(RAN_OUT)


def test_nccls_lack_of_memory_is_an_error_of_its_own_with_arguments_to_lower():
    assert [error for error in (*RAN_OUT, *NCCL, *OTHERS) if nccl_memory_error(error)] == list(NCCL)
    for error, last in zip(NCCL, ("out of memory", "1920 bytes"), strict=True):
        message = str(nccl_memory_error(error))
        assert all(name in message for name in ("memory_budget", "vllm_gpu_memory_utilization", last))


@pytest.mark.parametrize(
    ("budget", "uses_nccl", "fraction"),
    [
        (20 << 30, False, (20 * 2**30 - 8e8) / 2**36),
        (20 << 30, True, (20 * 2**30 - 15e8) / 2**36),
        (1 << 29, False, 2**-36),
    ],
)
def test_torchs_cap_is_the_budget_without_what_lies_outside_of_its_allocator(monkeypatch, budget, uses_nccl, fraction):
    set_by_torch = []
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**35, 2**36))
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *args: set_by_torch.append(args), raising=False)
    cap_allocator(torch.device("cuda:0"), budget, uses_nccl)
    assert set_by_torch == [(pytest.approx(fraction), 0)]


def test_cudnns_attention_is_switched():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for allowed in (True, False, before):
        allow_cudnn_attention(allowed)
        assert torch.backends.cuda.cudnn_sdp_enabled() is allowed


GB = 2**30


def v2(folder, limit, use, reclaimable=0):
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{use}\n",
        f"{folder}memory.stat": f"anon 1\ninactive_file {reclaimable}\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "files", "left"),
    [
        ("0::/\n", {}, []),
        ("4:memory:/job\n", {}, []),
        ("0::/job\n", v2("job/", "max", 5 * GB), []),
        ("0::/job\n", v2("job/", 6 * GB, 5 * GB), [GB]),
        ("0::/job\n", v2("job/", 6 * GB, 5 * GB, reclaimable=2 * GB), [3 * GB]),
        ("0::/job\n", v2("job/", 6 * GB, 7 * GB), [0]),
        ("0::/slice/job\n", v2("slice/", 4 * GB, 2 * GB) | v2("slice/job/", 3 * GB, GB), [2 * GB, 2 * GB]),
        ("9:cpu:/\n0::/on/the/host\n", v2("", 6 * GB, 4 * GB), [2 * GB]),
    ],
)
def test_every_cgroup_above_the_process_bounds_its_memory(tmp_path, cgroup, files, left):
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(cgroup_headrooms(tmp_path)) == left


_MANY_SHAPES = """
import sys, torch
from lowpeak.memory import limit_onednn_caches
def resident_mb():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024
if sys.argv[1] == "limited":
    limit_onednn_caches()
weight = torch.randn(256, 256).bfloat16()
for num_tokens in range(1, 421):
    torch.randn(num_tokens, 256).bfloat16() @ weight
    before = resident_mb() if num_tokens == 20 else before if num_tokens > 20 else 0
print(resident_mb() - before)
"""


@pytest.mark.release
def test_bf16_products_of_many_shapes_leave_little_behind():
    if not Path("/proc/self/status").exists():
        pytest.skip("resident memory is read from /proc")
    unset = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    grown = {
        way: float(
            subprocess.run(
                [sys.executable, "-c", _MANY_SHAPES, way], env=unset, check=True, capture_output=True, text=True
            ).stdout
        )
        for way in ("limited", "unlimited")
    }
    assert grown["limited"] < max(100, 0.5 * grown["unlimited"])

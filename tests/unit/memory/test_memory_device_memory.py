"""Free memory, and errors that mean that it ran out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from lowpeak.memory import cgroup_headrooms, free_bytes, is_out_of_memory

RAN_OUT = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
)
OTHERS = (RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("batch is out of range"))


def test_out_of_memory_errors_of_allocators_and_libraries_are_recognized():
    assert [error for error in (*RAN_OUT, *OTHERS) if is_out_of_memory(error)] == list(RAN_OUT)


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


def test_free_memory_is_positive_and_below_the_total():
    assert 0 < free_bytes("cpu") < psutil.virtual_memory().total


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

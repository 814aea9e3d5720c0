"""Device memory: which devices have it, how much is free, and which errors mean that it ran out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from lowpeak.cgroups import cgroup_folders, read_lines
from lowpeak.errors import EngineError, LowpeakError

# Of one process on a GPU: the CUDA context with torch's kernels and cuBLAS's workspaces.
_CONTEXT_BYTES = 800_000_000
# NCCL's channels and buffers of the communicators of a run.
_NCCL_BYTES = 700_000_000

# Words of errors, in lower case.
_OUT_OF_MEMORY = (
    # torch's allocators, the drivers of CUDA, HIP and Intel, Triton, vLLM's pool
    *("out of memory", "out_of_memory", "erroroutofmemory", "out_of_device_memory", "out_of_host_memory"),
    "can't allocate memory",  # torch's CPU allocator
    *("_alloc_failed", "_allocation_failed", "statusallocfailed"),  # cuBLAS, cuSOLVER, hipBLAS; cuDNN; MIOpen
    "blas_status_not_initialized",  # cuBLAS and hipBLAS, whose handle finds no room on a full device
)
# A kernel's blocks exceed the chip's shared memory; Inductor raises torch.OutOfMemoryError for it.
_OUT_OF_RESOURCES = "out of resource"


def has_device_memory(device: torch.device) -> bool:
    """Return whether the device has separate memory. The CPU has none, and Apple's is shared with the host."""
    return device.type not in ("cpu", "mps")


def limit_onednn_caches() -> None:
    """Bound the memory of compiled matrix products on CPUs, unless the user's environment sets it.

    Call it before the process's first bf16 product, when both caches read their capacity.
    """
    # oneDNN compiles a bf16 product for each shape, 0.6 MB and 0.3 ms. It keeps the last 1,024 of them, as does torch in a cache of
    # its own, and generation and packed micro-batches have a new shape in almost every forward.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")


def allow_cudnn_attention(allowed: bool) -> None:
    """Allow or forbid cuDNN's kernels in `scaled_dot_product_attention`, as `torch.backends.cuda.enable_cudnn_sdp`."""
    # torch prefers cuDNN on compute capability 9 and 10. A plan per shape takes 0.06 to 1 s (flashinfer#5245, sglang#4650) and
    # stays in host memory. Decoding and most padded passes have a new shape each time.
    torch.backends.cuda.enable_cudnn_sdp(allowed)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out, by its class or an allocator's or library's words.

    NCCL's errors do not count: its communicator is lost with them, so nothing can be retried (`ranks.nccl_memory_error`).
    """
    if isinstance(error, MemoryError):
        return True
    # lowpeak's other errors name their cause already. An EngineError repeats the words of vLLM's worker.
    if isinstance(error, LowpeakError) and type(error) is not EngineError:
        return False
    # Libraries raise RuntimeErrors; the words of other errors may be a file's name or a user's text.
    if not isinstance(error, RuntimeError | EngineError):
        return False
    text = str(error).lower()
    if _OUT_OF_RESOURCES in text:
        return False
    return isinstance(error, torch.OutOfMemoryError) or (
        "nccl" not in text and any(sign in text for sign in _OUT_OF_MEMORY)
    )


def bytes_outside_allocator(uses_nccl: bool) -> int:
    """Return the planned bytes of a GPU outside of torch's allocator: 0.8 GB, and 0.7 GB for NCCL if the run uses it."""
    return _CONTEXT_BYTES + (_NCCL_BYTES if uses_nccl else 0)


def cap_allocator(device: torch.device, budget: int, uses_nccl: bool) -> None:
    """Let torch refuse allocations beyond `budget` bytes of the GPU, until the process ends."""
    room = max(1, budget - bytes_outside_allocator(uses_nccl))
    torch.cuda.set_per_process_memory_fraction(room / total_bytes(device), device)


def free_bytes(device: torch.device | str) -> int:
    """Return how many bytes can be allocated now.

    On a CPU that is the least of what the system and the process's cgroups have left.
    """
    device = torch.device(device)
    if has_device_memory(device):
        module = torch.get_device_module(device)
        # Memory that torch's allocator has reserved and does not use is free as well.
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return module.mem_get_info(device)[0] + unused
    return min([psutil.virtual_memory().available, *cgroup_headrooms(Path("/"))])


def return_cached_memory(device: torch.device) -> None:
    """Return unused memory of torch's caching allocator to the driver."""
    if has_device_memory(device):
        torch.get_device_module(device).empty_cache()


def attainable_bytes(device: torch.device) -> int:
    """Return the bytes that this process has on the device, and those still free to it."""
    if has_device_memory(device):
        return int(torch.get_device_module(device).memory_allocated(device)) + free_bytes(device)
    return int(psutil.Process().memory_info().rss) + free_bytes(device)


def total_bytes(device: torch.device) -> int:
    """Return all memory of a device; on a CPU the bytes that this process could have."""
    if has_device_memory(device):
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return attainable_bytes(device)


def used_bytes(device: torch.device) -> int:
    """Return the bytes of a device that processes and their allocators hold; 0 on a CPU."""
    if not has_device_memory(device):
        return 0
    free, total = torch.get_device_module(device).mem_get_info(device)
    return int(total - free)


def room_in_budget(device: torch.device, budget: int | None) -> int:
    """Return the bytes that this process could allocate on the device within `budget` bytes of its own; None: all free ones."""
    free = free_bytes(device)
    return free if budget is None else max(0, min(free, budget - attainable_bytes(device) + free))


def cgroup_headrooms(root: Path) -> Iterator[int]:
    """Yield limit minus use of each limited cgroup (version 2) that contains the process.

    File pages that the kernel would drop under memory pressure do not count as used.
    """
    for folder in cgroup_folders(root, "memory"):
        limit = next(iter(read_lines(folder / "memory.max")), "max")
        if limit != "max":
            use = int(next(iter(read_lines(folder / "memory.current")), "0"))
            stat = dict(line.split() for line in read_lines(folder / "memory.stat"))
            yield max(0, int(limit) - max(0, use - int(stat.get("inactive_file", 0))))

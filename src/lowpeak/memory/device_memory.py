"""Device memory: which devices have it, how much is free, and which errors mean that it ran out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

# The CPU allocator; CUDA outside of torch's allocator, e.g. for pinned memory; cuBLAS, cuDNN and similar libraries.
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "_ALLOC_FAILED")


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


def with_index(device: torch.device) -> torch.device:
    """Return `device` with an index, as tensors name it; the current device's if it has none."""
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return torch.device(device.type, index)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out, by its class or an allocator's or library's words."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)


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


def attainable_bytes(device: torch.device) -> int:
    """Return the bytes that this process has on the device, and those that it could allocate now."""
    if has_device_memory(device):
        return int(torch.get_device_module(device).memory_allocated(device)) + free_bytes(device)
    return int(psutil.Process().memory_info().rss) + free_bytes(device)


def total_bytes(device: torch.device) -> int:
    """Return all memory of a device; on a CPU the bytes that this process could have."""
    if has_device_memory(device):
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return attainable_bytes(device)


def room_in_budget(device: torch.device, budget: int | None) -> int:
    """Return the bytes that this process could allocate on the device within `budget` bytes of its own; None: all free ones."""
    free = free_bytes(device)
    return free if budget is None else max(0, min(free, budget - attainable_bytes(device) + free))


def cgroup_headrooms(root: Path) -> Iterator[int]:
    """Yield limit minus use of each limited cgroup (version 2) that contains the process.

    File pages that the kernel would drop under memory pressure do not count as used.
    """
    group = next((line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")), None)
    if group is None:
        return
    mount = root / "sys/fs/cgroup"
    # Inside a container this folder may not exist: the mount is then the process's cgroup.
    folder = mount / group.strip("/")
    for each in (folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))):
        limit = next(iter(_lines(each / "memory.max")), "max")
        if limit != "max":
            use = int(next(iter(_lines(each / "memory.current")), "0"))
            stat = dict(line.split() for line in _lines(each / "memory.stat"))
            yield max(0, int(limit) - max(0, use - int(stat.get("inactive_file", 0))))


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().splitlines()
    return []

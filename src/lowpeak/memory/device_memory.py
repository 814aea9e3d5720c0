"""Device memory: whether a device has memory of its own, how much is free, and which errors say that it ran out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

# A CPU's allocator; CUDA where torch's allocator did not ask, pinned memory among it; cuBLAS, cuDNN and their kin.
_SIGNS = ("can't allocate memory", "CUDA error: out of memory", "_ALLOC_FAILED")


def has_memory(device: torch.device) -> bool:
    """Return whether a tensor on the device is not in host memory: False for the CPU and for Apple's shared memory."""
    return device.type not in ("cpu", "mps")


def with_index(device: torch.device) -> torch.device:
    """Return a device that has memory by its number, as its tensors name it; the current one if `device` has no number."""
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return torch.device(device.type, index)


def is_exhaustion(error: Exception) -> bool:
    """True for torch's and Python's own errors, and for plain ones of allocators and libraries that say so."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in _SIGNS)


def free_bytes(device: torch.device | str) -> int:
    """Return the memory that can be taken now: the device's free bytes; on a CPU what the system and the cgroups leave."""
    device = torch.device(device)
    if has_memory(device):
        module = torch.get_device_module(device)
        # What torch's allocator holds without using it is free as well.
        idle = module.memory_reserved(device) - module.memory_allocated(device)
        return module.mem_get_info(device)[0] + idle
    return min([psutil.virtual_memory().available, *cgroup_headrooms(Path("/"))])


def cgroup_headrooms(root: Path) -> Iterator[int]:
    """Yield limit minus use of every limited cgroup (version 2) that the process is in.

    Pages of files that the kernel would drop under pressure are not counted as used.
    """
    own = next((line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")), None)
    if own is None:
        return
    mount = root / "sys/fs/cgroup"
    folder = mount / own.strip("/")  # in a container it may not exist, and then the mount itself is the process's
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

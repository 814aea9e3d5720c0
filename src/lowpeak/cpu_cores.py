"""Physical CPU cores that this process may use, and the number of threads that torch gets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from lowpeak.cgroups import cgroup_folders, read_lines

THREADS_VARIABLE = "OMP_NUM_THREADS"


def allowed_cores(root: Path = Path("/")) -> int:
    """Return the physical cores that CPU affinity and the cgroups' CPU quotas allow, rounded down, at least 1."""
    number = os.cpu_count() or 1
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(number))
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {tuple(read_lines(root / topology.format(cpu))) or cpu for cpu in cpus}
    physical = psutil.cpu_count(logical=False) or number
    return max(1, int(min([len(cores), physical, *_cpu_quotas(root)])))


def limit_threads() -> None:
    """Lower torch's threads to the allowed cores, unless OMP_NUM_THREADS is set; call it in a run of one process.

    The current load is ignored: the number of threads can change bits.
    """
    import torch

    cores = allowed_cores()
    if THREADS_VARIABLE not in os.environ and cores < torch.get_num_threads():
        torch.set_num_threads(cores)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quota of each cgroup of this process (version 1 or 2), in CPUs."""
    for folder in cgroup_folders(root, "cpu"):
        words = " ".join([*read_lines(folder / "cpu.max"), *read_lines(folder / "cpu.cfs_quota_us")]).split()
        period = [*words[1:], *read_lines(folder / "cpu.cfs_period_us")]
        # "max" and -1 are no quotas, and what cannot be read is none.
        if words and period and words[0].isdigit() and period[0].isdigit() and int(period[0]) > 0:
            yield int(words[0]) / int(period[0])

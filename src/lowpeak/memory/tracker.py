"""Measures each phase: how long it took and the most memory that was alive in it; and tells what is free now.

On a device the peak is the allocator's, with what it reserved beside it. On Linux CPUs it is the resident high-water mark,
which the kernel lets a process reset (`proc(5)`, clear_refs 5); elsewhere only samples are possible, and `how` says so.
Peaks are absolute: they contain what was alive before the phase began, since that is what has to fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from lowpeak.memory.devices import has_memory
from lowpeak.memory.phases import Phase

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class PhaseUse:
    """What a phase took since the last `take`: seconds and calls are sums, bytes the highest of all its calls.

    `reserved_bytes` is what torch's caching allocator held at most; None where nothing reserves.
    """

    seconds: float
    peak_bytes: int
    calls: int
    reserved_bytes: int | None = None

    def merge(self, other: PhaseUse) -> PhaseUse:
        """Two uses of one phase as one."""
        return PhaseUse(
            self.seconds + other.seconds,
            max(self.peak_bytes, other.peak_bytes),
            self.calls + other.calls,
            max((b for b in (self.reserved_bytes, other.reserved_bytes) if b is not None), default=None),
        )


class Gauge(Protocol):
    """What can be asked of a device's memory; `how` says in words what its peaks are."""

    how: str

    def reset(self) -> None:
        """Let the peak begin anew at what is alive now."""
        ...

    def settle(self) -> None:
        """Wait until the work given to the device is done."""
        ...

    def peak(self) -> tuple[int, int | None]:
        """Most bytes alive, and reserved if the device has that, since `reset`."""
        ...


class MemoryTracker:
    """Measures phases on one device; phases may nest, and an outer one's peak contains its inner ones'.

    `with tracker.phase(Phase.TRAIN): ...`, then once a step `tracker.take()["train"].peak_bytes`.
    """

    def __init__(self, device: torch.device | str, gauge: Gauge | None = None) -> None:
        self._gauge = gauge if gauge is not None else gauge_of(torch.device(device))
        self._open: list[PhaseUse] = []
        self._names: list[str] = []  # of the open phases
        self._broken = self._ended = ""  # the phase that an error left last; the phase that ended last
        self._done: dict[str, PhaseUse] = {}

    @property
    def how(self) -> str:
        """What the peaks are, in words: they differ by device and system."""
        return self._gauge.how

    @property
    def where(self) -> str:
        """The innermost phase that runs, or that an error has left since, in words; any thread may ask."""
        name = next(iter(self._names[-1:]), self._broken)
        if name:
            return f"phase {name}"
        return f"the step, after phase {self._ended}" if self._ended else "the start"

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Measure the block as (a part of) `phase`, also when it raises."""
        self._read()
        self._open.append(PhaseUse(0.0, 0, 1))
        self._names.append(phase.value)
        self._broken = ""
        start = time.perf_counter()
        try:
            yield
            self._gauge.settle()
        except BaseException:
            self._broken = self._broken or phase.value
            raise
        finally:
            seconds = time.perf_counter() - start
            self._read()
            self._ended = self._names.pop()
            use = self._open.pop().merge(PhaseUse(seconds, 0, 0))
            self._done[phase.value] = use.merge(self._done.get(phase.value, PhaseUse(0.0, 0, 0)))

    def take(self) -> dict[str, PhaseUse]:
        """The uses since the last call, by the phase's name; phases still open count when they end."""
        done, self._done = self._done, {}
        return done

    def _read(self) -> None:
        """Credit the peak since the last reading to all open phases, and begin anew: the gauge has only one peak."""
        if self._open:
            peak, reserved = self._gauge.peak()
            piece = PhaseUse(0.0, peak, 0, reserved)
            self._open = [use.merge(piece) for use in self._open]
        self._gauge.reset()


class DeviceGauge:
    """The peaks of torch's caching allocator on one device."""

    how = "bytes of tensors on the device (torch's allocator)"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch = torch.get_device_module(device)

    def reset(self) -> None:
        """Let both peaks begin at what is alive."""
        self._torch.reset_peak_memory_stats(self._device)

    def settle(self) -> None:
        """Wait for the device, so that a phase's seconds contain its kernels: one wait per phase."""
        self._torch.synchronize(self._device)

    def peak(self) -> tuple[int, int | None]:
        """Allocated and reserved bytes."""
        return self._torch.max_memory_allocated(self._device), self._torch.max_memory_reserved(self._device)


class ResidentGauge:
    """The process's resident high-water mark, reset through the kernel; the reset takes the same time at any size."""

    how = "resident memory of the process (high-water mark)"

    def reset(self) -> None:
        """Let the mark fall to what is resident now."""
        _CLEAR_REFS.write_text("5")

    def settle(self) -> None:
        """Nothing runs behind the CPU's back."""

    def peak(self) -> tuple[int, int | None]:
        """The mark."""
        return _status_bytes("VmHWM"), None


class SampledGauge:
    """Resident memory where its mark cannot be reset: a peak between two looks goes unseen."""

    how = "resident memory of the process (sampled where phases begin and end; peaks in between are not seen)"

    def __init__(self) -> None:
        self._before = 0

    def reset(self) -> None:
        """Look at what is resident."""
        self._before = _resident_bytes()

    def settle(self) -> None:
        """Nothing runs behind the CPU's back."""

    def peak(self) -> tuple[int, int | None]:
        """The larger of two looks: now and at `reset`."""
        return max(self._before, _resident_bytes()), None


def gauge_of(device: torch.device) -> Gauge:
    """The best gauge that `device` and this system have."""
    if has_memory(device):
        return DeviceGauge(device)
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return SampledGauge()
    return ResidentGauge()


def free_bytes(device: torch.device | str) -> int:
    """Memory that can be taken now: the device's free bytes; on a CPU what the system and the cgroups both leave."""
    device = torch.device(device)
    if has_memory(device):
        module = torch.get_device_module(device)
        # What torch's allocator holds without using it is free as well.
        idle = module.memory_reserved(device) - module.memory_allocated(device)
        return module.mem_get_info(device)[0] + idle
    return free_host_bytes(Path("/"))


def free_host_bytes(root: Path) -> int:
    """MemAvailable below `root`'s proc, bounded by the limit minus the use of each cgroup that the process is in."""
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        import psutil  # type: ignore[import-untyped]  # Linux needs none

        return int(psutil.virtual_memory().available)
    return min([_kilobytes(meminfo, "MemAvailable"), *_cgroup_headrooms(root)])


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Limit minus use of every limited cgroup above the process: version 2's files first, then version 1's.

    Pages of files that the kernel would drop under pressure are not counted as used.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        own = mount / path.strip("/")  # in a container it may not exist, and then the mount itself is the process's
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(mount))):
            yield from _headroom(folder, *files)


def _headroom(folder: Path, limit_file: str, use_file: str, reclaimable: str) -> Iterator[int]:
    limit = next(iter(_lines(folder / limit_file)), "max")
    if limit == "max":
        return
    use = int(next(iter(_lines(folder / use_file)), "0"))
    stat = dict(line.split() for line in _lines(folder / "memory.stat"))
    yield max(0, int(limit) - max(0, use - int(stat.get(reclaimable, 0))))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _status_bytes(field: str) -> int:
    return _kilobytes(_STATUS, field)


def _resident_bytes() -> int:
    if _STATUS.exists():
        return _status_bytes("VmRSS")
    import psutil

    return int(psutil.Process().memory_info().rss)


def _kilobytes(path: Path, field: str) -> int:
    """A `Name:  123 kB` line of a proc file, in bytes."""
    text = path.read_text()
    start = text.index(f"{field}:") + len(field) + 1
    return int(text[start:].split(maxsplit=1)[0]) * 1024

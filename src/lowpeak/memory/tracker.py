"""Measures each phase: how long it took and the most memory that was alive in it; and tells what is free now.

On a device the peak is the allocator's, with what it reserved beside it. On a CPU it is the resident high-water mark, which
Linux lets a process reset (`proc(5)`, clear_refs 5); elsewhere resident memory is sampled, and `how` says so.
Peaks are absolute: they contain what was alive before the phase began, since that is what has to fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from lowpeak.memory.device_memory import has_memory
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
        return PhaseUse(
            self.seconds + other.seconds,
            max(self.peak_bytes, other.peak_bytes),
            self.calls + other.calls,
            max((b for b in (self.reserved_bytes, other.reserved_bytes) if b is not None), default=None),
        )


class MemoryTracker:
    """Measures phases on one device; phases may nest, and an outer one's peak contains its inner ones'.

    `with tracker.phase(Phase.TRAIN): ...`, then once a step `tracker.take()["train"].peak_bytes`.
    """

    def __init__(self, device: torch.device | str, gauge: DeviceGauge | ResidentGauge | None = None) -> None:
        device = torch.device(device)
        self._gauge: DeviceGauge | ResidentGauge
        self._gauge = gauge or (DeviceGauge(device) if has_memory(device) else ResidentGauge())
        self._open: list[PhaseUse] = []
        self._names: list[str] = []  # of the open phases
        self._broken = self._ended = ""  # the phase that an error left last; the phase that ended last
        self._done: dict[str, PhaseUse] = {}

    @property
    def how(self) -> str:
        return self._gauge.how

    @property
    def where(self) -> str:
        """Return the innermost phase that runs, or that an error has left since, in words; any thread may ask."""
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
        """Return the uses since the last call, by the phase's name; phases still open count when they end."""
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
    """The peaks of torch's caching allocator on one device; `how` says in words what they are."""

    how = "bytes of tensors on the device (torch's allocator)"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch = torch.get_device_module(device)

    def reset(self) -> None:
        """Let the peak begin anew at what is alive now."""
        self._torch.reset_peak_memory_stats(self._device)

    def settle(self) -> None:
        self._torch.synchronize(self._device)

    def peak(self) -> tuple[int, int | None]:
        """Return the most bytes alive, and reserved (None where nothing reserves), since `reset`."""
        return self._torch.max_memory_allocated(self._device), self._torch.max_memory_reserved(self._device)


class ResidentGauge:
    """The process's resident memory: its high-water mark if the kernel resets it, else the larger of two looks.

    The kernel's reset takes the same time at any size.
    """

    def __init__(self, clear_refs: Path = _CLEAR_REFS) -> None:
        self._clear_refs: Path | None = None
        self._before = 0
        with suppress(OSError):
            clear_refs.write_text("5")
            self._clear_refs = clear_refs
        self.how = "resident memory of the process (" + (
            "high-water mark)"
            if self._clear_refs
            else "sampled where phases begin and end; peaks in between are not seen)"
        )

    def reset(self) -> None:
        if self._clear_refs:
            self._clear_refs.write_text("5")
        else:
            self._before = psutil.Process().memory_info().rss

    def settle(self) -> None:
        """Nothing runs behind the CPU's back."""

    def peak(self) -> tuple[int, int | None]:
        if self._clear_refs:
            return int(_STATUS.read_text().partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024, None
        return max(self._before, psutil.Process().memory_info().rss), None

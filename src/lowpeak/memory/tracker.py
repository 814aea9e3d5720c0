"""Duration and peak memory of each phase.

On a device the peak is that of torch's allocator, with its reserved bytes as a second figure. On a CPU it is the resident
high-water mark, which Linux lets a process reset (`proc(5)`, clear_refs 5); elsewhere resident memory is sampled at both
ends of a phase. Peaks are absolute: they include what was in memory before the phase began, because all of it has to fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from lowpeak.memory.device_memory import has_device_memory
from lowpeak.memory.phases import Phase

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class PhaseUse:
    """Duration and peak memory of a phase, over all its calls since they were last read.

    `reserved_bytes` is the peak that torch's caching allocator reserved; None on a CPU.
    """

    seconds: float
    peak_bytes: int
    reserved_bytes: int | None = None

    def merge(self, other: PhaseUse) -> PhaseUse:
        return PhaseUse(
            self.seconds + other.seconds,
            max(self.peak_bytes, other.peak_bytes),
            max((b for b in (self.reserved_bytes, other.reserved_bytes) if b is not None), default=None),
        )


class MemoryTracker:
    """Measures phases on one device: `with tracker.phase(Phase.TRAIN): ...`.

    Phases may nest; an outer phase's peak includes the inner ones'. Once a step the trainer reads and resets the uses.
    """

    def __init__(self, device: torch.device | str, gauge: DeviceGauge | ResidentGauge | None = None) -> None:
        device = torch.device(device)
        self._gauge: DeviceGauge | ResidentGauge
        self._gauge = gauge or (DeviceGauge(device) if has_device_memory(device) else ResidentGauge())
        self._open: list[PhaseUse] = []
        self._open_names: list[str] = []
        self._failed_phase = self._last_phase = ""  # the phase that raised the last error; the phase that ended last
        self._done: dict[str, PhaseUse] = {}

    @property
    def current_phase(self) -> str:
        """Describe the innermost open phase, or the one that raised an error since. Safe to call from any thread."""
        name = next(iter(self._open_names[-1:]), self._failed_phase)
        if name:
            return f"phase {name}"
        return f"the step, after phase {self._last_phase}" if self._last_phase else "the start"

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Measure the block as one call of `phase`, also if it raises."""
        self._read()
        self._open.append(PhaseUse(0.0, 0))
        self._open_names.append(phase.value)
        self._failed_phase = ""
        start = time.perf_counter()
        try:
            yield
            self._gauge.synchronize()
        except BaseException:
            self._failed_phase = self._failed_phase or phase.value  # the innermost phase raises first
            raise
        finally:
            seconds = time.perf_counter() - start
            self._read()
            self._last_phase = self._open_names.pop()
            use = self._open.pop().merge(PhaseUse(seconds, 0))
            self._done[phase.value] = use.merge(self._done.get(phase.value, PhaseUse(0.0, 0)))

    def pop_uses(self) -> dict[str, PhaseUse]:
        """Return and reset the uses, by the phases' names; an open phase counts when it ends."""
        done, self._done = self._done, {}
        return done

    def _read(self) -> None:
        """Credit the gauge's peak to all open phases and reset it. Nested phases share the one gauge."""
        if self._open:
            peak, reserved = self._gauge.peak()
            reading = PhaseUse(0.0, peak, reserved)
            self._open = [use.merge(reading) for use in self._open]
        self._gauge.reset()


class DeviceGauge:
    """The peak of torch's caching allocator on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch = torch.get_device_module(device)

    def reset(self) -> None:
        """Reset the peak to the memory that is allocated now."""
        self._torch.reset_peak_memory_stats(self._device)

    def synchronize(self) -> None:
        self._torch.synchronize(self._device)

    def peak(self) -> tuple[int, int | None]:
        """Return the most bytes allocated since `reset`, and the most reserved (None on a CPU)."""
        return self._torch.max_memory_allocated(self._device), self._torch.max_memory_reserved(self._device)


class ResidentGauge:
    """The peak resident memory of this process.

    It is the kernel's high-water mark if the process may reset it, else the larger of two samples. A reset takes equally
    long at any size.
    """

    def __init__(self, clear_refs: Path = _CLEAR_REFS) -> None:
        self._clear_refs: Path | None = None
        self._before = 0
        with suppress(OSError):
            clear_refs.write_text("5")
            self._clear_refs = clear_refs

    def reset(self) -> None:
        if self._clear_refs:
            self._clear_refs.write_text("5")
        else:
            self._before = psutil.Process().memory_info().rss

    def synchronize(self) -> None:
        """Do nothing: CPU operations are synchronous."""

    def peak(self) -> tuple[int, int | None]:
        if self._clear_refs:
            return int(_STATUS.read_text().partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024, None
        return max(self._before, psutil.Process().memory_info().rss), None

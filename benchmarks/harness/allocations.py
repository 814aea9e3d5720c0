"""Peak memory of a run's phases: bytes that torch's CPU allocator has given out, by its events, and resident memory."""

from __future__ import annotations

import ctypes
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from lowpeak.memory.phases import Phase
from lowpeak.parallel.partial_gather import decoder_layers

REST = "rest"  # what no phase has
_MARK = "a phase begins"
_LOAD, _COUNTED = "load", "counted"
_M_MMAP_THRESHOLD = -3
_SETTLE_S = 0.003  # in which gloo's threads free the blocks of a collective that has ended
_COLLECTIVES = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")


@dataclass(frozen=True)
class Block:
    """A block that torch's allocator gives out, or takes back if `is_freed`."""

    address: int
    size: int
    is_freed: bool


@dataclass(frozen=True)
class Mark:
    """The beginning of a phase, and the ranges of addresses that the process had then, sorted."""

    phase: str
    starts: Sequence[int]
    stops: Sequence[int]

    def has(self, address: int) -> bool:
        at = bisect_right(self.starts, address) - 1
        return at >= 0 and address < self.stops[at]


class AllocatorEvents:
    """The allocator's events while the context is open, and marks of the phases between them.

    torch's profiler writes one event for each block that is given out or taken back, by any operation, inside kernels too. Open
    it before the first tensor: what was allocated before is not in the events. `begin` marks a phase with an event of the same
    clock.

    gloo's threads free some blocks, and the profiler does not see it. Such a block has been freed once its address is given out
    again, or belongs to the process no more, which is looked up at each mark: glibc gives blocks of 4 KiB and more back at once
    after `return_blocks`. `look` is a mark within a phase.
    """

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._marks: list[Mark] = []
        self._phase = REST

    def __enter__(self) -> AllocatorEvents:
        self._profile.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.stop()

    def begin(self, phase: str) -> None:
        self._phase = phase
        self.look()

    def look(self, *_: object) -> None:
        if dist.is_initialized():
            time.sleep(_SETTLE_S)
        self._marks.append(Mark(self._phase, *_mapped_ranges()))
        with torch.profiler.record_function(_MARK):
            pass

    def peaks(self) -> dict[str, int]:
        """Return the most bytes alive in each phase: at its beginning, or after any event in it.

        Phases before the mark "counted" are left out, but for "load".
        """
        return peaks_of(self._events())

    def _events(self) -> list[Block | Mark]:
        profile: Any = self._profile.profiler
        found: list[tuple[int, Block | None]] = []
        waiting = list(profile.kineto_results.experimental_event_tree())
        while waiting:
            event = waiting.pop()
            waiting += event.children
            if event.name == "[memory]":
                fields = event.extra_fields
                block = Block(fields.ptr, abs(fields.alloc_size), fields.alloc_size < 0)
                found.append((event.start_time_ns, block))
            elif event.name == _MARK:
                found.append((event.start_time_ns, None))
        found.sort(key=lambda item: item[0])
        marks = iter(self._marks)
        return [next(marks) if block is None else block for _, block in found]


def peaks_of(events: Iterable[Block | Mark]) -> dict[str, int]:
    """Return the most bytes alive in each phase."""
    blocks: dict[int, int] = {}
    peaks: dict[str, int] = {}
    live, phase, counted = 0, REST, False
    for event in events:
        if isinstance(event, Mark):
            phase, counted = event.phase, counted or event.phase == _COUNTED
            for address in [address for address in blocks if not event.has(address)]:
                live -= blocks.pop(address)
        else:
            live -= blocks.pop(event.address, 0)
            if not event.is_freed:
                blocks[event.address] = event.size
                live += event.size
        if counted or phase == _LOAD:
            peaks[phase] = max(live, peaks.get(phase, 0))
    return {name: peak for name, peak in peaks.items() if name not in (REST, _COUNTED)}


def _mapped_ranges() -> tuple[list[int], list[int]]:
    """Return the first and the last addresses of the process's memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    pairs = [line.partition(" ")[0].partition("-") for line in lines]
    return [int(start, 16) for start, _, _ in pairs], [int(stop, 16) for _, _, stop in pairs]


class ResidentMemory:
    """The most memory that is resident in each phase, by the kernel's mark, which a process may reset."""

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._phase, self._counted = REST, False
        self._libc = ctypes.CDLL(None)

    def __enter__(self) -> ResidentMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self.begin(REST)

    def begin(self, phase: str) -> None:
        status = Path("/proc/self/status").read_text()
        seen = int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024
        if self._counted or self._phase == _LOAD:
            self._peaks[self._phase] = max(seen, self._peaks.get(self._phase, 0))
        self._counted = self._counted or phase == _COUNTED
        self._phase = phase
        self._libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")

    def look(self, *_: object) -> None:
        """Do nothing: the kernel's mark needs no help."""

    def peaks(self) -> dict[str, int]:
        return {name: peak for name, peak in self._peaks.items() if name not in (REST, _COUNTED)}


class _Steps(TrainerCallback):
    """Marks of a run's beginning, and of its first step's end: the optimizer's states exist from then on."""

    def __init__(self, begin: Callable[[str], object]) -> None:
        self._begin = begin

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._begin(_LOAD)
        self._begin(REST)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._begin(_COUNTED)
        self._begin(REST)


def mark_phases(trainer: Any, begin: Callable[[str], object]) -> None:
    """Call `begin` with each phase of a trainer's run: those of its tracker, and a micro-batch's forward and backward.

    The optimizer's phase begins after the last backward, with the norm of the gradients.
    """
    trainer.add_callback(_Steps(begin))
    tracker, strategy = trainer.run.tracker, trainer.run.strategy
    inner_phase, inner_batch, inner_backward = tracker.phase, strategy.micro_batch_context, strategy.backward

    @contextmanager
    def phase(name: Any) -> Iterator[None]:
        if name is not Phase.TRAIN:
            begin(name.value)
        with inner_phase(name):
            yield
        begin(Phase.OPTIMIZER.value if name is Phase.TRAIN else REST)

    def micro_batch(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        begin("forward")
        context: AbstractContextManager[None] = inner_batch(*args, **kwargs)
        return context

    def backward(*args: Any, **kwargs: Any) -> None:
        begin("backward")
        inner_backward(*args, **kwargs)

    tracker.phase, strategy.micro_batch_context, strategy.backward = phase, micro_batch, backward


def return_blocks() -> None:
    """Let glibc get blocks of 4 KiB and more from the kernel, and give them back when they are freed."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 4096)


@contextmanager
def looking_at_collectives(look: Callable[..., object]) -> Iterator[None]:
    """Call `look` before and after each collective of FSDP2: what gloo's threads have freed is found then."""
    names = [name for name in _COLLECTIVES if hasattr(dist, name)]
    functions = {name: getattr(dist, name) for name in names}

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            look()
            result = function(*args, **kwargs)
            look()
            return result

        return call

    for name, function in functions.items():
        setattr(dist, name, watched(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)


def look_at_layers(model: nn.Module, look: Callable[..., object]) -> None:
    """Call `look` before the forward of each layer."""
    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(look)

"""Peak memory of a run's phases: bytes that torch's CPU allocator has given out, and resident memory."""

from __future__ import annotations

import ctypes
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.cpp_extension import load
from transformers import TrainerCallback

from lowpeak.memory import AsyncHostMover, frozen_offload, offload_frozen
from lowpeak.memory.phases import Phase
from lowpeak.parallel import decoder_layers
from lowpeak.training import teacher

REST = "rest"  # outside of any phase
_LOAD, _COUNTED = "load", "counted"
_M_MMAP_THRESHOLD = -3
_SETTLE_S = 0.003  # in which gloo's threads free the copies of a collective that has ended
_COLLECTIVES = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")


@functools.cache
def compile_allocator() -> Any:
    """Return the module of allocations.cpp, compiled once per machine."""
    return load("lowpeak_allocations", [str(Path(__file__).with_suffix(".cpp"))])


class PhasePeaks(ABC):
    """The most memory in each phase, from `begin` to the next. Phases before "counted" are left out, but for "load"."""

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._phase, self._counted = REST, False

    @abstractmethod
    def _take_peak(self) -> int:
        """Return the most memory since the last call."""

    def __enter__(self) -> PhasePeaks:
        return self

    def __exit__(self, *error: object) -> None:
        self.begin(REST)

    def begin(self, phase: str) -> None:
        peak = self._take_peak()
        if self._counted or self._phase == _LOAD:
            self._peaks[self._phase] = max(peak, self._peaks.get(self._phase, 0))
        self._counted = self._counted or phase == _COUNTED
        self._phase = phase

    def peaks(self) -> dict[str, int]:
        return {name: peak for name, peak in self._peaks.items() if name not in (REST, _COUNTED)}


class AllocatedMemory(PhasePeaks):
    """Bytes that torch's allocator has given out on any thread, since this was made; earlier tensors are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self._allocator = compile_allocator()
        self._allocator.install()

    def _take_peak(self) -> int:
        return int(self._allocator.take_peak())


class ResidentMemory(PhasePeaks):
    """Resident memory, by the kernel's mark, which a process may reset."""

    def __init__(self) -> None:
        super().__init__()
        self._libc = ctypes.CDLL(None)
        # glibc gets blocks of 4 KiB and more from the kernel, and gives them back when they are freed.
        self._libc.mallopt(_M_MMAP_THRESHOLD, 4096)

    def _take_peak(self) -> int:
        status = Path("/proc/self/status").read_text()
        self._libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024


@contextmanager
def wait_around_collectives() -> Iterator[None]:
    """Wait before and after each collective of FSDP2, so that no copy of an earlier one is still alive."""
    functions = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}

    def settled(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(_SETTLE_S)
            result = function(*args, **kwargs)
            time.sleep(_SETTLE_S)
            return result

        return call

    for name, function in functions.items():
        setattr(dist, name, settled(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)


class _CopyingMover(AsyncHostMover):
    """Copies within a CPU's memory, as between a device and its host."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def to_device(self, host: Tensor) -> Tensor:
        return host.clone()

    def wait(self, flat: Tensor) -> None:
        """Do nothing: a copy is complete at once."""


def keep_on_host(model: nn.Module) -> None:
    """Move a frozen model's weights to memory that is not counted, from which its forwards copy them as to a device.

    A teacher's head is copied, too.
    """
    frozen_offload.empty_page_locked = lambda size, dtype, device: torch.frombuffer(bytearray(size), dtype=dtype)
    teacher.is_sharded = lambda model: True
    offload_frozen(model, decoder_layers(model), _CopyingMover())


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

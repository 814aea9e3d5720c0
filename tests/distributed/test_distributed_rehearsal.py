"""A rehearsal of FSDP2 on two ranks says of its phases what two real ranks take."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, PartialState
from setups import FSDP2, allow_meshes_on_cpu, note, seen
from torch.distributed.tensor import DTensor

from child_processes import succeed_on_ranks
from lowpeak.parallel.fsdp2 import Fsdp2
from lowpeak.plan.rehearsal.rehearsal import rehearse
from lowpeak.plan.rehearsal.rehearsal_inputs import MeshShape, RehearsalInputs
from lowpeak.training.step import run_step, score
from rehearsal_cases import ALGORITHM, CORE, make_model, micro_batches

# Tensors of a page and more come from the kernel and go back to it: what malloc keeps would be a later phase's.
LIBC, M_MMAP_THRESHOLD = ctypes.CDLL(None), -3
MB = 1e6  # what a process has beside tensors is the same in all phases


class HighWater:
    """The most memory resident in each phase, by the kernel's own mark."""

    def __init__(self):
        self.peaks = {}
        self._phase = None

    def begin(self, phase):
        if self._phase is not None:
            status = Path("/proc/self/status").read_text()
            seen = int(status[status.index("VmHWM:") + 6 :].split(maxsplit=1)[0]) * 1024
            self.peaks[self._phase] = max(seen, self.peaks.get(self._phase, 0))
        self._phase = phase
        LIBC.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


class Watched(Fsdp2):
    """FSDP2 whose forwards and backwards are phases."""

    def __init__(self, accelerator, water):
        super().__init__(accelerator)
        self._water = water

    def micro_batch_context(self, model, last):
        self._water.begin("forward")
        return super().micro_batch_context(model, last)

    def backward(self, loss, last):
        self._water.begin("backward")
        super().backward(loss, last)


def step(place):
    """A step that warms up, and the peaks of the one that counts."""
    LIBC.mallopt(M_MMAP_THRESHOLD, 4096)
    os.environ.update(FSDP2)
    PartialState(cpu=True)
    allow_meshes_on_cpu()
    accelerator, model = Accelerator(), make_model().train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True))
    assert isinstance(next(model.parameters()), DTensor)
    batches, water = micro_batches(16, 16, 4, 64), HighWater()
    strategy = Watched(accelerator, water)
    for _ in range(2):
        water.peaks.clear()
        model.eval()
        water.begin("score")
        score(model, batches, CORE)
        model.train()
        run_step(model, batches, ALGORITHM, CORE, strategy, ALGORITHM.coefficients())
        water.begin("optimizer")
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        water.begin(None)
    note(place, **water.peaks)
    accelerator.end_training()


@pytest.mark.extended
def test_phases_differ_as_on_two_real_ranks(tmp_path):
    succeed_on_ranks(step, tmp_path)
    scoring = replace(ALGORITHM, needs=frozenset(("old",)))
    rehearsed = rehearse(RehearsalInputs(make_model, micro_batches(16, 16, 4, 64), scoring, CORE, MeshShape(2)))
    for real in seen(tmp_path):
        assert real.keys() == {"score", "forward", "backward", "optimizer"}
        constant = {phase: (real[phase] - rehearsed.peak(phase)) / MB for phase in real}
        assert max(constant.values()) - min(constant.values()) < 5, constant

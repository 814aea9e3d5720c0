"""The real step that a rehearsal is compared with, under FSDP2: `run_rehearsal.py OUT` writes its peaks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from setups import FSDP2, allow_meshes_on_cpu
from torch.distributed.tensor import DTensor

from lowpeak.strategies.fsdp2 import Fsdp2
from lowpeak.training.step import run_step, score
from rehearsing import ALGORITHM, CORE, make_model, micro_batches


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
        Path("/proc/self/clear_refs").write_text("5")


class Watched(Fsdp2):
    """FSDP2 whose forwards and backwards are phases."""

    def __init__(self, accelerator, water):
        super().__init__(accelerator)
        self._water = water

    def accumulate(self, model, last):
        self._water.begin("forward")
        return super().accumulate(model, last)

    def backward(self, loss, last):
        self._water.begin("backward")
        super().backward(loss, last)


def main(out):
    """A step that warms up, and the one that counts."""
    torch.set_num_threads(1)
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
    Path(out, f"{accelerator.process_index}.json").write_text(json.dumps(water.peaks))
    accelerator.end_training()


main(*sys.argv[1:])

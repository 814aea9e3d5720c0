"""Durations and peaks of phases, also of nested ones."""

import subprocess
import sys
import time

import pytest

from lowpeak.memory.phases import Phase
from lowpeak.memory.tracker import MemoryTracker


class ScriptedGauge:
    """A gauge whose memory a test sets; it has one peak, as real ones do."""

    description = "scripted"

    def __init__(self):
        self.alive = self.highest = 100
        self.settled = 0

    def use(self, num_bytes):
        """Take `num_bytes` and give them back."""
        self.highest = max(self.highest, self.alive + num_bytes)

    def reset(self):
        self.highest = self.alive

    def synchronize(self):
        self.settled += 1

    def peak(self):
        return self.highest, 2 * self.highest


def tracked():
    gauge = ScriptedGauge()
    return gauge, MemoryTracker("cpu", gauge)


def test_a_phases_peak_excludes_earlier_and_intermediate_peaks():
    gauge, tracker = tracked()
    gauge.use(900)
    with tracker.phase(Phase.ROLLOUT):
        gauge.use(50)
    gauge.use(900)
    with tracker.phase(Phase.TRAIN):
        gauge.use(20)
    uses = tracker.pop_uses()
    assert (uses["rollout"].peak_bytes, uses["rollout"].reserved_bytes) == (150, 300)
    assert (uses["train"].peak_bytes, uses["train"].reserved_bytes) == (120, 240)


@pytest.mark.parametrize(("before", "inside", "after"), [(70, 10, 20), (10, 70, 20), (10, 20, 70)])
def test_an_outer_phases_peak_includes_inner_phases(before, inside, after):
    gauge, tracker = tracked()
    with tracker.phase(Phase.EVALUATE):
        gauge.use(before)
        with tracker.phase(Phase.ROLLOUT):
            gauge.use(inside)
            with tracker.phase(Phase.REWARD):
                gauge.use(5)
        gauge.use(after)
    uses = tracker.pop_uses()
    peaks = {name: use.peak_bytes for name, use in uses.items()}
    assert peaks == {"evaluate": 170, "rollout": 100 + inside, "reward": 105}


def test_calls_of_one_phase_add_up_in_time_and_take_the_highest_peak():
    gauge, tracker = tracked()
    for num_bytes in (10, 60, 30):
        with tracker.phase(Phase.TRAIN):
            gauge.use(num_bytes)
            time.sleep(0.01)
    use = tracker.pop_uses()["train"]
    assert use.peak_bytes == 160
    assert 0.03 <= use.seconds < 1.0
    assert gauge.settled == 3


def test_reading_uses_resets_them_and_a_phase_counts_when_it_ends_or_fails():
    gauge, tracker = tracked()

    def fail():
        with tracker.phase(Phase.TRAIN):
            with tracker.phase(Phase.SCORE):
                pass
            assert list(tracker.pop_uses()) == ["score"]
            with tracker.phase(Phase.OPTIMIZER):
                gauge.use(40)
                raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    with tracker.phase(Phase.SAVE):
        gauge.use(80)
    uses = tracker.pop_uses()
    assert {name: use.peak_bytes for name, use in uses.items()} == {"optimizer": 140, "train": 140, "save": 180}
    assert tracker.pop_uses() == {}


# Allocations of 64 kB and more go straight to the kernel and back, so that resident memory is what is alive.
MEASURE = """
from pathlib import Path
import torch
from lowpeak.memory.phases import Phase
from lowpeak.memory.tracker import MemoryTracker, ResidentGauge

MB = 2**20
def take(num_mb):
    torch.ones(num_mb * MB // 4)

tracker = MemoryTracker("cpu")
take(1)
with tracker.phase(Phase.SYNC):
    pass
with tracker.phase(Phase.EVALUATE):
    with tracker.phase(Phase.ROLLOUT):
        take(64)
    with tracker.phase(Phase.REWARD):
        take(16)
with tracker.phase(Phase.SAVE):
    pass
uses = tracker.pop_uses()
base = uses["sync"].peak_bytes
for name in ("evaluate", "rollout", "reward", "save"):
    print(name, (uses[name].peak_bytes - base) / MB)

sampled = MemoryTracker("cpu", ResidentGauge(Path("/no/clear_refs")))
with sampled.phase(Phase.ROLLOUT):
    kept = torch.ones(32 * MB // 4)
print("sampled", (sampled.pop_uses()["rollout"].peak_bytes - base) / MB)
"""


def test_64_megabytes_count_in_their_phase_and_the_outer_one_only():
    env = {"PYTHONPATH": ":".join(sys.path), "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env).stdout
    seen = {name: float(mb) for name, mb in (line.split() for line in output.splitlines())}
    assert seen == pytest.approx({"rollout": 64, "evaluate": 64, "reward": 16, "save": 0, "sampled": 32}, abs=5)

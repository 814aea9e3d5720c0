"""Phases are measured as the kernel saw them, nested ones too."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lowpeak.memory import MemoryTracker, Phase, ResidentGauge, cgroup_headrooms, free_bytes


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


def test_a_phase_sees_its_own_peak_and_not_one_from_before_or_between():
    gauge, tracker = tracked()
    gauge.use(900)
    with tracker.phase(Phase.ROLLOUT):
        gauge.use(50)
    gauge.use(900)
    with tracker.phase(Phase.TRAIN):
        gauge.use(20)
    uses = tracker.take()
    assert (uses["rollout"].peak_bytes, uses["rollout"].reserved_bytes) == (150, 300)
    assert (uses["train"].peak_bytes, uses["train"].reserved_bytes) == (120, 240)


@pytest.mark.parametrize(("before", "inside", "after"), [(70, 10, 20), (10, 70, 20), (10, 20, 70)])
def test_an_outer_phase_has_the_highest_of_its_pieces_and_an_inner_one_only_its_own(before, inside, after):
    gauge, tracker = tracked()
    with tracker.phase(Phase.EVALUATE):
        gauge.use(before)
        with tracker.phase(Phase.ROLLOUT):
            gauge.use(inside)
            with tracker.phase(Phase.REWARD):
                gauge.use(5)
        gauge.use(after)
    uses = tracker.take()
    peaks = {name: use.peak_bytes for name, use in uses.items()}
    assert peaks == {"evaluate": 170, "rollout": 100 + inside, "reward": 105}


def test_calls_of_one_phase_add_up_in_time_and_take_the_highest_peak():
    gauge, tracker = tracked()
    for num_bytes in (10, 60, 30):
        with tracker.phase(Phase.TRAIN):
            gauge.use(num_bytes)
            time.sleep(0.01)
    use = tracker.take()["train"]
    assert (use.calls, use.peak_bytes) == (3, 160)
    assert 0.03 <= use.seconds < 1.0
    assert gauge.settled == 3


def test_taking_forgets_and_a_phase_counts_when_it_ends_also_by_an_error():
    gauge, tracker = tracked()

    def fail():
        with tracker.phase(Phase.TRAIN):
            with tracker.phase(Phase.SCORE):
                pass
            assert list(tracker.take()) == ["score"]
            with tracker.phase(Phase.OPTIMIZER):
                gauge.use(40)
                raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    with tracker.phase(Phase.SAVE):
        gauge.use(80)
    uses = tracker.take()
    assert {name: use.peak_bytes for name, use in uses.items()} == {"optimizer": 140, "train": 140, "save": 180}
    assert tracker.take() == {}


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
uses = tracker.take()
base = uses["sync"].peak_bytes
for name in ("evaluate", "rollout", "reward", "save"):
    print(name, (uses[name].peak_bytes - base) / MB)

sampled = MemoryTracker("cpu", ResidentGauge(Path("/no/clear_refs")))
with sampled.phase(Phase.ROLLOUT):
    kept = torch.ones(32 * MB // 4)
print("sampled", (sampled.take()["rollout"].peak_bytes - base) / MB)
"""


def test_64_megabytes_in_a_phase_are_seen_there_and_in_the_phase_around_it_and_nowhere_else():
    env = {"PYTHONPATH": ":".join(sys.path), "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env).stdout
    seen = {name: float(mb) for name, mb in (line.split() for line in said.splitlines())}
    assert seen == pytest.approx({"rollout": 64, "evaluate": 64, "reward": 16, "save": 0, "sampled": 32}, abs=5)


def test_the_tracker_says_what_it_measures():
    ways = {ResidentGauge().description, ResidentGauge(Path("/no/clear_refs")).description}
    assert MemoryTracker("cpu").description in ways
    assert len(ways) == 2


def test_a_phase_costs_little():
    tracker = MemoryTracker("cpu")
    times = []
    for _ in range(200):
        start = time.perf_counter()
        with tracker.phase(Phase.TRAIN):
            pass
        times.append(time.perf_counter() - start)
    assert sorted(times)[100] < 0.0002


GB = 2**30


def v2(folder, limit, use, reclaimable=0):
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{use}\n",
        f"{folder}memory.stat": f"anon 1\ninactive_file {reclaimable}\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "files", "left"),
    [
        ("0::/\n", {}, []),
        ("4:memory:/job\n", {}, []),
        ("0::/job\n", v2("job/", "max", 5 * GB), []),
        ("0::/job\n", v2("job/", 6 * GB, 5 * GB), [GB]),
        ("0::/job\n", v2("job/", 6 * GB, 5 * GB, reclaimable=2 * GB), [3 * GB]),
        ("0::/job\n", v2("job/", 6 * GB, 7 * GB), [0]),
        ("0::/slice/job\n", v2("slice/", 4 * GB, 2 * GB) | v2("slice/job/", 3 * GB, GB), [2 * GB, 2 * GB]),
        ("9:cpu:/\n0::/on/the/host\n", v2("", 6 * GB, 4 * GB), [2 * GB]),
    ],
)
def test_every_cgroup_above_the_process_bounds_its_memory(tmp_path, cgroup, files, left):
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(cgroup_headrooms(tmp_path)) == left


def test_free_memory_of_this_machine_is_some_and_less_than_it_has():
    assert 0 < free_bytes("cpu") < psutil.virtual_memory().total

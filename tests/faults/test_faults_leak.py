"""No leak: what is alive after 200 steps is what was alive after 10."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

COUNT_WHAT_IS_ALIVE = """
import gc, json, sys
from collections import Counter
from pathlib import Path

import torch
from fault_runs import Case, build
from transformers import TrainerCallback

from lowpeak.records import Completion, Group, MicroBatch, Prompt, Record, TokenBatch

KEPT = (Prompt, Completion, Group, Record, TokenBatch, MicroBatch)


def alive():
    gc.collect()
    kinds = [type(x) for x in gc.get_objects()]
    counts = Counter(kind.__name__ for kind in kinds if kind in KEPT)
    counts["tensors"] = sum(issubclass(kind, torch.Tensor) for kind in kinds)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {**counts, "resident": int(status["VmRSS"].split()[0]) * 1024}


class Look(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step in (10, 200):
            print(json.dumps(alive()), flush=True)


torch.set_num_threads(1)
shared = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.04, "logging_steps": 1000}
case = Case(args={**shared, "max_steps": 201, "save_strategy": "no"}, callbacks=(Look(),))
build(case, Path(sys.argv[1])).train()
"""


@pytest.fixture(scope="module")
def looks(tmp_path_factory):
    """Counts at the same point of a rollout's use, after 10 and after 200 steps of one fresh process."""
    paths = [str(TESTS), str(TESTS / "faults"), *(path for path in sys.path if path)]
    # Above this size memory goes back to the system when it is freed, so that what stays resident is in use.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", COUNT_WHAT_IS_ALIVE, str(tmp_path_factory.mktemp("leak"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    early, late = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"'))
    return early, late


def test_as_many_records_live_after_200_steps_as_after_10_and_no_more_tensors(looks):
    early, late = ({n: count for n, count in look.items() if n not in ("resident", "tensors")} for look in looks)
    assert early == late
    assert early["Record"] == 16
    # One record has six tensors, and what a step holds differs a little with its rollout.
    assert looks[1]["tensors"] - looks[0]["tensors"] < 6


def test_resident_memory_after_200_steps_is_that_after_10_within_2_mib(looks):
    """The records of 95 rollouts are three times as much; over 1000 steps it stayed within 1 MiB."""
    early, late = (look["resident"] for look in looks)
    assert late - early < 2 << 20

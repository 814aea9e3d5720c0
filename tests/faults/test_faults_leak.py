"""No leak: what is alive after 200 steps is what was alive after 10."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from fault_runs import At, Case, build

from child_processes import succeed
from lowpeak.records import Completion, Group, MicroBatch, Prompt, Record, TokenBatch

KEPT = (Prompt, Completion, Group, Record, TokenBatch, MicroBatch)


def alive() -> dict[str, int]:
    gc.collect()
    kinds = [type(x) for x in gc.get_objects()]
    counts = Counter(kind.__name__ for kind in kinds if kind in KEPT)
    counts["tensors"] = sum(issubclass(kind, torch.Tensor) for kind in kinds)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {**counts, "resident": int(status["VmRSS"].split()[0]) * 1024}


def train_and_look(case: Case, place: Path) -> None:
    """Count at the same point of a rollout's use, after 10 and after 200 steps."""
    found, trainer = [], build(case, place / "run")
    for step in (10, 200):
        trainer.add_callback(At("on_step_begin", step, lambda model: found.append(alive())))
    trainer.train()
    (place / "looks.json").write_text(json.dumps(found))


@pytest.mark.release
def test_as_many_records_live_after_200_steps_as_after_10_and_no_more_tensors_or_memory(tmp_path):
    shared = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.04, "logging_steps": 1000}
    succeed(train_and_look, Case(args={**shared, "max_steps": 201, "save_strategy": "no"}), tmp_path)
    early, late = json.loads((tmp_path / "looks.json").read_text())
    # One record has six tensors, and what a step holds differs a little with its rollout.
    assert late.pop("tensors") - early.pop("tensors") < 6
    # The records of 95 rollouts are three times as much; over 1000 steps it stayed within 1 MiB.
    assert late.pop("resident") - early.pop("resident") < 2 << 20
    assert early == late
    assert early["Record"] == 16

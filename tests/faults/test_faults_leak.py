"""No leak: what is alive after 200 steps is what was alive after 10."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_runs import Case, build
from transformers import TrainerCallback

from children import succeed
from lowpeak.records import Completion, Group, MicroBatch, Prompt, Record, TokenBatch

KEPT = (Prompt, Completion, Group, Record, TokenBatch, MicroBatch)


def alive() -> dict[str, int]:
    gc.collect()
    kinds = [type(x) for x in gc.get_objects()]
    counts = Counter(kind.__name__ for kind in kinds if kind in KEPT)
    counts["tensors"] = sum(issubclass(kind, torch.Tensor) for kind in kinds)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {**counts, "resident": int(status["VmRSS"].split()[0]) * 1024}


class Look(TrainerCallback):
    """Counts at the same point of a rollout's use, after 10 and after 200 steps."""

    def __init__(self) -> None:
        self.found: list[dict[str, int]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (10, 200):
            self.found.append(alive())


def train_and_look(case: Case, place: Path) -> None:
    look, trainer = Look(), build(case, place / "run")
    trainer.add_callback(look)
    trainer.train()
    (place / "looks.json").write_text(json.dumps(look.found))


@pytest.fixture(scope="module")
def looks(tmp_path_factory):
    place = tmp_path_factory.mktemp("leak")
    shared = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.04, "logging_steps": 1000}
    succeed(train_and_look, Case(args={**shared, "max_steps": 201, "save_strategy": "no"}), place)
    return json.loads((place / "looks.json").read_text())


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

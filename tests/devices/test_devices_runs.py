"""Every kind of run on the second device: the CPU's weights and log to the last bit, and no host read within a phase."""

from __future__ import annotations

import json

import pytest
from device_runs import CASES, run_on_cpu, run_on_twin

from case_selection import mark_extended, selected_cases
from child_processes import succeed

SECONDS = 400.0  # for a process on a busy machine
WAITS = ("attention/sdpa.py",)  # on the CPU's way, which a GPU does not take


CORE = (
    *("algorithms: grpo", "algorithms: rloo, normalised", "algorithms: ppo, an adapter", "algorithms: online dpo, ipo"),
    *("algorithms: sft", "algorithms: reward", "parts: a model by its path", "parts: rewards: a model"),
    *("offloads: during the rollout, a reference", "offloads: frozen models, a reference"),
    *("offloads: activations, grpo", "offloads: the optimizer, ppo"),
    *("resumed: the optimizer in host memory", "resumed: ppo"),
)


def waits_in_passes(waits):
    """Copies to the device that the host waits for while it scores or trains, but for those of `WAITS`."""
    return [
        line for line in waits if line.startswith(("phase score", "phase train")) and not any(w in line for w in WAITS)
    ]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """What each selected case comes to on the CPU and on the second device, each of which has one process for all."""
    place = tmp_path_factory.mktemp("devices")
    for function in (run_on_cpu, run_on_twin):
        succeed(function, selected_cases(request, "name"), place, seconds=SECONDS)
    return [json.loads((place / device / "found.json").read_text()) for device in ("cpu", "twin")]


@pytest.mark.parametrize("name", mark_extended(list(CASES), CORE, "release"))
def test_a_run_comes_to_the_cpus_numbers_and_reads_once_a_phase(runs, name):
    expected, found = (dict(each[name]) for each in runs)
    assert "error" not in {**expected, **found}, (expected.get("error"), found.get("error"))
    crossed, steps = found.pop("crossed"), found["steps"]
    del expected["crossed"]
    assert found == {**expected, "devices": ["twin"], "offloaded": found["offloaded"]}
    reads, lines = crossed["reads"], crossed["lines"]
    assert "phase train" not in reads, lines
    assert "phase optimizer" not in reads, lines
    assert not waits_in_passes(crossed["waits"])
    assert reads.get("phase score", 0) <= steps, lines  # one a rollout, which serves a step or more
    assert reads["the step, after phase train"] == steps, lines  # loss, metrics and gradient norm together

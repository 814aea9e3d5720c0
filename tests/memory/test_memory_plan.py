"""A plan has of each phase the bytes that torch's allocator gives out in a real run."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.harness.plan_cases import CASES
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from lowpeak.memory.usage import Kind
from lowpeak.plan.hardware import Machine
from lowpeak.plan.plan import Plan, make_plan
from lowpeak.plan.rehearsal.cpu_scratch import CpuScratch
from lowpeak.plan.rehearsal.fake_ranks import fake_process_group
from lowpeak.plan.rehearsal.storage_meter import StorageMeter
from lowpeak.plan.request import PlanRequest

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.015  # of a peak: tensors below a page, and what a run has beside its models, are not planned
BY_NAME = {case.name: case for case in CASES}
MEASURED = ("LoRA, PPO, adapter", "format: 16 bits", "ddp: base", "LoRA, DPO", "fsdp2: DPO", "KTO", "branches: beta")
STEP = ("score", "forward", "backward", "optimizer")
# Runs with a teacher, and the same runs without one.
PLACED = {
    "fsdp2: distillation, own": "fsdp2: base",
    "distillation, host": "shape: base",
    "distillation, LoRA, base": "LoRA of rank 64",
    "distillation, live": "shape: base",
}
CHUNKS = 5_000_000  # bytes for a chunk's second buffer, and for a few more tensors of a pass


def plan_of(name: str, folder: Path, **args: object) -> Plan:
    case = BY_NAME[name]
    config = case.config(str(folder))
    for key, value in args.items():
        setattr(config, key, value)
    return make_plan(
        PlanRequest(
            case.kind,
            config,
            case.shape.config(),
            Machine(case.ranks, 16 << 30, device="cpu"),
            case.strategy,
            case.adapter(),
            [case.reward.config()] if case.reward is not None else [],
            prompt_tokens=case.prompt,
        )
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Mapping[str, dict[str, dict[str, int]]]:
    """Planned and measured bytes of each phase, by the name of the run."""
    path, names = tmp_path_factory.mktemp("runs") / "found", {*MEASURED, *PLACED, *PLACED.values()}
    command = [sys.executable, "-m", "benchmarks.plan_accuracy", "--save", str(path), "--only", *sorted(names)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    found: Mapping[str, dict[str, dict[str, int]]] = json.loads(path.read_text())
    assert found.keys() == names
    return found


@pytest.mark.release
def test_real_runs_take_the_planned_bytes_in_every_phase(runs):
    for name, result in runs.items():
        assert result["planned"].keys() == result["measured"].keys(), name
        ratios = {phase: result["planned"][phase] / peak for phase, peak in result["measured"].items()}
        if name == "distillation, host":  # planned are the two largest units, which run before the pass needs most
            assert 1 <= ratios.pop("score") < 1.05
        assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=TOLERANCE), name


@pytest.mark.release
@pytest.mark.parametrize("name", PLACED)
def test_a_teacher_adds_to_a_steps_peak_what_its_placement_leaves_on_the_device(runs, name):
    with_teacher, without = (
        max(runs[each]["measured"].get(phase, 0) for phase in STEP) for each in (name, PLACED[name])
    )
    case = BY_NAME[name]
    bound = CHUNKS + 8 * case.completion * (case.teacher or case.shape).hidden * 4  # and the teacher's states
    if case.teacher is not None:
        with torch.device("meta"):
            teacher = AutoModelForCausalLM.from_config(case.teacher.config())
        parts = [teacher.model.layers[0], teacher.lm_head]
        bound += sum(parameter.nbytes for part in parts for parameter in part.parameters())
        bound += sum(parameter.nbytes for parameter in teacher.parameters()) // 2 if case.strategy == "fsdp2" else 0
    assert with_teacher - without <= bound


@pytest.mark.extended
def test_a_sharded_policy_is_gathered_for_a_rollout_within_its_budget(tmp_path):
    none, all_layers = (plan_of("fsdp2: base", tmp_path, gather_budget=budget) for budget in (0, 1 << 40))
    weights = plan_of("shape: base", tmp_path).phases["load"].peak
    layer = (weights - 8_192 * 256 * 4) / 4
    assert none.phases["rollout"].device[Kind.GATHERED] == pytest.approx(layer, rel=0.01)
    assert all_layers.phases["rollout"].device[Kind.GATHERED] == pytest.approx(weights, rel=0.01)


def test_completions_of_different_groups_share_no_prompt(tmp_path):
    groups = 2
    assert plan_of("shape: base", tmp_path).tokens == groups * 64 + 8 * (40 - 1)


def test_all_gathers_in_a_row_take_the_copies_that_gloo_makes_of_three():
    with fake_process_group(2), FakeTensorMode(), StorageMeter(1, CpuScratch()) as meter:
        parts = [torch.zeros(count) for count in (50, 100, 200, 400)]
        results = [torch.zeros(2 * part.numel()) for part in parts]
        alive = meter.live_bytes
        meter.begin("in a row")
        for result, part in zip(results, parts, strict=True):
            dist.all_gather_into_tensor(result, part)
        meter.begin("one")
        results[0].add_(1)
        dist.all_gather_into_tensor(results[0], parts[0])
        meter.begin("reduced")
        dist.reduce_scatter_tensor(parts[3], results[3])
        meter.begin(None)
    peaks = {phase: kinds.total() - alive for phase, kinds in meter.peaks.items()}
    assert peaks == {"in a row": 4 * (800 + 400 + 200), "one": 4 * 100, "reduced": 4 * 800}
    assert meter.peaks["one"][Kind.BUCKETS] == 4 * 100


def test_kernels_of_a_cpu_widen_bf16_in_copies():
    with StorageMeter(1, CpuScratch()) as meter:
        narrow, wide = torch.zeros(100, dtype=torch.bfloat16), torch.zeros(100)
        alive = meter.live_bytes
        meter.begin("norm")
        torch.linalg.vector_norm(narrow, dtype=torch.float32)
        meter.begin("sum")
        narrow.add_(wide)
        wide.add_(narrow)
        meter.begin(None)
    assert {phase: kinds.total() - alive for phase, kinds in meter.peaks.items()} == {"norm": 404, "sum": 800}


COUNTED = """
import threading, torch
from benchmarks.harness.allocations import AllocatedMemory
empty = lambda size: torch.empty(size, dtype=torch.uint8)
with AllocatedMemory() as memory:
    kept, others = empty(100), []
    memory.begin("load")
    memory.begin("rest")
    empty(1_000)
    memory.begin("counted")
    memory.begin("forward")
    thread = threading.Thread(target=lambda: others.append(empty(20)))
    thread.start(), thread.join()
    empty(50)
    memory.begin("backward")
    thread = threading.Thread(target=others.clear)
    thread.start(), thread.join()
    memory.begin("optimizer")
print(memory.peaks())
"""


def test_allocations_of_all_threads_count_until_they_are_freed():
    output = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, timeout=120, check=True)
    assert ast.literal_eval(output.stdout.splitlines()[-1]) == {
        "load": 100, "forward": 170, "backward": 120, "optimizer": 100
    }  # fmt: skip

"""What the manual says of GPUs is made from results files: who proved what, the recipes' table, the plan's constants."""

from __future__ import annotations

import subprocess

import pytest
from benchmarks.gpu_results import (
    PAGE,
    README,
    RESULTS,
    constant_commands,
    constants,
    proved_on,
    read_results,
    with_recipes,
)
from benchmarks.harness.process import ROOT

VERSIONS = {"torch": "2.13.0", "vllm": "not installed"}
CARD = {**VERSIONS, "device 0": "NVIDIA H100 80GB HBM3, 79.6 GiB, compute capability 9.0"}
RUN = {
    "run": "qwen2.5-7b-full-80gb", "command": "grpo", "date": "2026-12-02", "environment": CARD, "device": "cuda:0",
    "devices": 1, "events": {},
    "arguments": {"dtype": "bfloat16"}, "step_time": 10.0, "tokens_per_second": 100.0,
    "seconds": {"train": 4.0, "rollout": 5.0}, "evaluation": {"eval_accuracy": 0.75}, "outside_bytes": 900_000_000,
    "peak_memory": {"train": 60 << 30, "rollout": 50 << 30}, "reserved_memory": {"train": 63 << 30, "rollout": 55 << 30},
}  # fmt: skip
SEVERAL = {**RUN, "devices": 4, "arguments": {"accelerate_config": "fsdp2"}, "outside_bytes": 2_000_000_000}
PLAN = {"tokens_per_second": 200.0, "seconds_per_step": {"train": 4.0, "rollout": 6.0}}
DECODE = {"again_ms_per_step": 9.6, "planned_ms_per_step": 4.8}


def selftest(environment, date="2026-12-01", **rows):
    rows = [{"row": name, "result": result, "numbers": DECODE} for name, result in rows.items()]
    return {"environment": environment, "device": "cuda:0", "date": date, "rows": rows}


def test_the_committed_pages_are_what_the_committed_files_make():
    results, readme = read_results(RESULTS), README.read_text(encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == proved_on(results), "run python -m benchmarks.gpu_results"
    assert readme == with_recipes(readme, results), "run python -m benchmarks.gpu_results"


def test_a_row_that_is_ok_and_a_run_prove_their_features_on_their_card():
    page = proved_on({"run": RUN, "selftest": selftest(CARD, ddp="ok", fsdp2="FAILED", zero3="not run")})
    proof = "NVIDIA H100 80GB HBM3 | torch 2.13.0 | 2026-12-0"
    for line in (f"DDP | {proof}1", f"storage formats | {proof}2", f"native engine | {proof}2", f"ddp | {proof}1"):
        assert f"| {line} |" in page
    assert f"| qwen2.5-7b-full-80gb | {proof}2 |" in page
    for name in ("FSDP2", "ZeRO-3", "LoRA", "qwen2.5-7b-lora-24gb", "fsdp2"):
        assert f"| {name} | CPU only |" in page


def test_a_cpu_proves_nothing_and_the_newest_file_of_a_card_counts():
    assert proved_on({"cpu": {**RUN, "device": "cpu"}}) == proved_on({})
    assert "| native engine | CPU only |" in proved_on({"sft": {**RUN, "command": "sft"}})
    newer = selftest({**CARD, "torch": "2.14.0"}, "2026-12-03", ddp="ok")
    page = proved_on({"b": newer, "a": selftest(CARD, ddp="ok")})
    assert page.count("| DDP |") == 1
    assert "| DDP | NVIDIA H100 80GB HBM3 | torch 2.14.0 | 2026-12-03 |" in page


def test_the_table_of_recipes_has_what_a_card_measured():
    readme = with_recipes(README.read_text(encoding="utf-8"), {"run": RUN})
    row = "qwen2.5-7b-full-80gb | measured on NVIDIA H100 80GB HBM3 | 10.0 | 100 | 63.0 | 17 minutes | 0.75"
    assert f"| {row} |" in readme


def test_constants_follow_from_what_was_measured():
    results = {"run": RUN, "four": SEVERAL, "qwen2.5-7b-full-80gb.plan": PLAN, "selftest": selftest(CARD, decode="ok")}
    found = constants(results)
    assert found == {
        # half of the planned tokens took the planned seconds
        "FLOPS_SHARE": pytest.approx(0.4 / 2),
        "BANDWIDTH_SHARE": pytest.approx(0.6 * 6 / 5 / 2),
        "LAYER_LATENCY": pytest.approx(3.6e-4 * 2),
        "FRAGMENTATION": pytest.approx(0.05),  # of train, which peaks
        "CONTEXT_BYTES": 900_000_000,
        "NCCL_BYTES": 1_100_000_000,
    }
    assert constants({"cpu": {**RUN, "device": "cpu"}}) == {}
    for command, new in zip(
        constant_commands(found), ("0.05", "0.2", "0.36", "900000000", "0.00072", "1100000000"), strict=True
    ):
        line, path = command.split("'")[1].partition("s/")[0], command.split("' ")[1].partition("  #")[0]
        before = (ROOT / path).read_text(encoding="utf-8").splitlines()
        printed = subprocess.run(
            command.replace("sed -i", "sed"), shell=True, cwd=ROOT, capture_output=True, check=True, text=True
        )
        changed = [after for old, after in zip(before, printed.stdout.splitlines(), strict=True) if old != after]
        assert changed == [printed.stdout.splitlines()[int(line) - 1]]
        assert new in changed[0]

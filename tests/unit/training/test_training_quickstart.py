"""examples/quickstart.py with DPO and KTO: it trains on pairs, measures by completions, and refuses other lessons."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from benchmarks.harness.process import ROOT
from benchmarks.harness.task import load_example


@pytest.fixture
def quickstart(monkeypatch, tmp_path):
    """Run the example with options, into a folder; its supervised start is a step of four rows, and its datasets are small."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = load_example("quickstart")
    sort = example.TINY_TASKS["sort"]
    short = replace(sort, warm={"max_steps": 1, "per_device_train_batch_size": 4}, steps=2)
    monkeypatch.setitem(example.TINY_TASKS, "sort", short)
    monkeypatch.setattr(example, "PREFERENCES", 128)
    make_prompts = example.noisy_sort.make_prompts
    monkeypatch.setattr(example.noisy_sort, "make_prompts", lambda rows, *seed, **more: make_prompts(16, *seed, **more))

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["quickstart.py", "--output_dir", str(tmp_path), *options])
        example.main()

    return run


@pytest.mark.parametrize(("algorithm", "step"), [("dpo", "64 pairs"), ("kto", "128 completions")])
def test_training_on_pairs_is_measured_by_completions_before_and_after(quickstart, tmp_path, capsys, algorithm, step):
    quickstart("--algorithm", algorithm, "--steps", "2")
    printed = capsys.readouterr().out
    assert f"{algorithm.upper()}: 2 steps of {step}" in printed
    assert printed.count("accuracy on 16 held-out prompts: greedy 0.") == 3
    files = {path.name for path in (tmp_path / algorithm).iterdir()}
    assert {"curve.png", "report.html", "model.safetensors", "journal"} <= files
    assert {"preferences.jsonl", "warm_start"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("options", [("--task", "tools"), ("--task", "sums"), ("--model", "smollm2")], ids=" ".join)
@pytest.mark.parametrize("algorithm", ["distillation", "dpo", "kto"])
def test_another_lesson_is_refused(quickstart, capsys, algorithm, options):
    with pytest.raises(SystemExit):
        quickstart("--algorithm", algorithm, *options)
    assert capsys.readouterr().err.count("leave --model and --task out") == 1

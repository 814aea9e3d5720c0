"""What lowpeak does on every supported version of its dependencies: `make test-versions` has the oldest ones.

tests/families/test_family_generation.py runs there, too.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from case_selection import mark_extended
from lowpeak.cli.commands import main
from small_runs import DATA, KINDS, SAVED, make, rows, same, saved, trained, weights
from tiny_models import tiny_model

ROOT = Path(__file__).parents[2]
ADAPTED = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"])}
SMALL = ("--num_generations", "4", "--max_completion_length", "5")
RUNS = {**{kind: {} for kind in KINDS}, "GRPO with LoRA": ADAPTED}


def test_the_lock_of_the_oldest_versions_has_the_lower_bounds_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounded = " ".join(project["dependencies"] + project["optional-dependencies"]["peft"])
    lock = (ROOT / "requirements-oldest.txt").read_text()
    for package in ("transformers", "accelerate", "peft", "datasets"):
        bound = re.search(rf"\b{package}>=([\d.]+)", bounded)[1]
        assert re.search(rf"^{package}=={re.escape(bound)}(\.0)* ", lock, re.MULTILINE), package


@pytest.mark.parametrize("name", mark_extended(list(RUNS), ["GRPO", "Reward"]))
def test_a_trainer_steps_saves_loads_and_resumes_to_the_same_bits(name, tmp_path):
    kind, parts = name.split()[0], RUNS[name]
    whole = trained(kind, tmp_path / "whole", **SAVED, **parts)
    resumed = trained(kind, tmp_path / "resumed", resume=tmp_path / "whole" / "checkpoint-1", **SAVED, **parts)
    assert same(weights(whole), weights(resumed))
    whole.save_model(str(tmp_path / "model"))
    if not parts:
        auto = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
        loaded = dict(auto.from_pretrained(tmp_path / "model", dtype=torch.float32).named_parameters())
        assert all(values.equal(weights(whole)[key]) for key, values in loaded.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_names_the_fast_paths(kind, tmp_path):
    resolved = make(kind, tmp_path).dry_run()
    assert "packed" in resolved["layout"]
    assert kind in DATA or resolved["generation"] == "decode loop"


@pytest.mark.extended
def test_a_plan_and_a_command_name_the_fast_paths(tmp_path, capfd):
    model, data = saved(tmp_path / "model", tiny_model()), tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows()))
    assert main(["plan", "--model", model, "--gpu", "rtx4090", "--prompt_tokens", "8", *SMALL]) == 0
    assert "decode loop" in capfd.readouterr().out
    words = f"--model {model} --dataset {data} --reward exact_match --max_steps 1 --output_dir {tmp_path / 'out'}"
    assert main(["grpo", *words.split(), "--use_cpu", "true", "--report_to", "none", *SMALL]) == 0
    assert "decode loop" in capfd.readouterr().err

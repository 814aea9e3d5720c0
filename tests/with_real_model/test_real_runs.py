"""Each kind of run with real weights: steps, storage formats, 4 bits, memory, the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.harness.planned import Case, Shape
from benchmarks.plan_accuracy import compare
from huggingface_hub import ModelCard
from peft import LoraConfig
from real_runs import assert_greedy_tokens, logprob_errors, make_real
from transformers import AutoConfig, BitsAndBytesConfig

from allocation_cap import CappedPhases
from fake_hub import serve_hub
from lowpeak.memory.phases import Phase
from small_runs import column, weights

EXAMPLES = Path(__file__).parents[2] / "examples"
LORA = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])


def test_greedy_tokens_of_64_prompts_equal_those_of_generate(smollm2, tokenizer):
    assert_greedy_tokens(smollm2, tokenizer, count=64, max_new_tokens=16)


@pytest.mark.parametrize(("autocast", "mean", "share"), [(True, 0.02, 0.01), (False, 0.035, 0.06)])
def test_log_probs_sampled_in_bf16_are_near_those_of_a_full_forward_in_fp32(smollm2, tokenizer, autocast, mean, share):
    dtype = torch.float32 if autocast else torch.bfloat16
    found = logprob_errors(smollm2, tokenizer, dtype, autocast)
    assert found.mean() < mean
    assert (found > 0.1).float().mean() < share


@pytest.mark.parametrize("kind", ["RLOO", "PPO", "OnlineDPO", "SFT", "Reward"])
def test_one_step_of_each_trainer(smollm2, kind, tmp_path):
    run = make_real(kind, tmp_path, smollm2, max_steps=1)
    before = weights(run)
    run.train()
    assert column(run, "grad_norm")[0] > 0
    moved = [not values.equal(before[name]) for name, values in weights(run).items()]
    assert sum(moved) > 0.9 * len(moved)


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_bf16_weights_are_trained_in_each_storage_format(smollm2, bits, tmp_path):
    run = make_real("SFT", tmp_path, smollm2, max_steps=1, weight_bits=bits, learning_rate=1e-4)
    before = weights(run)
    run.train()
    assert {values.dtype for values in weights(run).values()} == {torch.bfloat16}
    assert any(not values.equal(before[name]) for name, values in weights(run).items())


def test_lora_on_weights_of_4_bits(smollm2, tmp_path):
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    run = make_real("GRPO", tmp_path, smollm2, peft_config=LORA, quantization_config=quantized, max_steps=1)
    run.train()
    assert column(run, "grad_norm")[0] > 0


@dataclass(frozen=True)
class RealShape(Shape):
    """The shape of the model in a folder."""

    folder: str = ""

    def config(self) -> Any:
        config = AutoConfig.from_pretrained(self.folder)
        config.dtype = torch.float32
        return config


def test_a_plan_has_the_measured_bytes_of_each_phase(smollm2):
    result = compare(Case("smollm2", "real", shape=RealShape(folder=smollm2), args={"max_steps": 2, "save_steps": 2}))
    ratios = {phase: result["planned"][phase] / peak for phase, peak in result["measured"].items()}
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=0.015)


def test_a_pass_that_runs_out_of_memory_is_repeated_in_smaller_pieces(smollm2, tmp_path):
    more = {"max_steps": 1, "num_iterations": 2}  # old log-probs take a pass of their own
    free = make_real("GRPO", tmp_path / "free", smollm2, **more)
    uncapped = CappedPhases(free, {})
    free.train()
    cap = uncapped.highest["score"] * 2 // 3
    tight = make_real("GRPO", tmp_path / "tight", smollm2, **more)
    capped = CappedPhases(tight, {Phase.SCORE: cap})
    tight.train()
    assert capped.num_errors > 0
    assert capped.highest["score"] <= cap
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close(column(tight, name), column(free, name), rtol=1e-3, atol=1e-6)


PUSH = """
import sys
from peft import LoraConfig
from real_runs import make_real
run = make_real("GRPO", sys.argv[2], sys.argv[1], max_steps=1, hub_token="secret", peft_config=LoraConfig(r=8))
run.train()
run.push_to_hub()
"""


def test_the_hub_gets_a_trained_adapter_with_its_card_and_chat_template(smollm2, tmp_path):
    with serve_hub() as hub:
        hub_variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        variables = {**os.environ, **hub_variables, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", PUSH, smollm2, str(tmp_path / "sums-model")]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr[-3000:]
    files = hub.files["someone/sums-model"]
    assert {"adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files.keys()
    assert {"lowpeak", "grpo"} <= set(ModelCard(files["README.md"].decode()).data.tags)


def test_the_notebook_runs(tmp_path, monkeypatch):
    cells = json.loads((EXAMPLES / "smollm2.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    folder = tmp_path / "examples"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "agg")
    assert "max_steps=STEPS" in code
    assert "make_held_out()" in code
    exec(
        code.replace("max_steps=STEPS", "max_steps=1").replace("make_held_out()", "make_held_out().select(range(8))"),
        {},
    )
    assert (tmp_path / "runs" / "notebook" / "journal" / "steps.jsonl").exists()

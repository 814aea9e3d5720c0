"""The recipes for GPUs: a plan and a dry run of each, from the published sizes of its model and a small tokenizer."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
import yaml
from transformers import Qwen2Config

from architecture.sources import ROOT
from lowpeak.cli.commands import dispatch
from lowpeak.cli.plan_request import machine_of, parse_plan, plan_request
from lowpeak.plan.plan import make_plan

FOLDER = ROOT / "examples" / "recipes"
RECIPES = ("qwen2.5-7b-full-80gb", "qwen2.5-7b-lora-24gb", "qwen2.5-7b-vllm-4-2")
# Qwen/Qwen2.5-7B-Instruct's config.json
PUBLISHED = Qwen2Config(
    vocab_size=152_064, hidden_size=3_584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    intermediate_size=18_944, max_position_embeddings=32_768, rms_norm_eps=1e-6, tie_word_embeddings=False, dtype="bfloat16",
    bos_token_id=151_643, eos_token_id=151_645, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
PARAMETERS = 7_615_616_512
ADAPTERS = 80_740_352
# In place of --train_devices, which must be there, and of the servers.
ON_ONE_CPU = "--train_devices none --vllm_devices none --accelerate_config none --vllm_mode server"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model's config and a tokenizer of its own, without weights, and four rows of GSM8K's form."""
    sys.path.insert(0, str(ROOT / "examples"))
    from gsm8k_warm_start import train_tokenizer

    folder = tmp_path_factory.mktemp("recipes")
    rows = [{"question": f"{n} apples and {n} more?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(64)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    train_tokenizer(text for row in rows for text in row.values()).save_pretrained(folder / "model")
    PUBLISHED.save_pretrained(folder / "model")
    return folder / "model"


def test_each_recipe_is_here():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == [*RECIPES]


@pytest.mark.release
@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_in_a_recipes_first_lines_fits_its_gpus(name, model):
    path = FOLDER / f"{name}.yaml"
    command = next(line for line in path.read_text().splitlines() if line.startswith("#   lowpeak plan"))
    words = shlex.split(command.removeprefix("#   lowpeak plan"))
    assert words[1] == str(path.relative_to(ROOT))
    options, job = parse_plan(["--config", str(path), *words[2:], "--model", str(model)])
    plan = make_plan(plan_request(options, job, machine_of(options, job)))
    assert plan.fits
    assert plan.counts.total == PARAMETERS + (ADAPTERS if job.model.use_peft else 0)
    assert 0.6 < plan.peak / plan.request.machine.memory < 0.95 or plan.request.machine.num_devices == 4
    assert plan.planned_steps == 100
    # What README and docs/proved-on.md show.
    shown = json.loads((ROOT / "docs" / "results" / f"{name}.plan.json").read_text())
    assert {key: plan.as_dict()[key] for key in ("peak", "minutes")} == {
        key: pytest.approx(shown[key], rel=0.02) for key in ("peak", "minutes")
    }
    assert plan.request.strategy == ("fsdp2" if name.endswith("4-2") else "single")


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_of_a_recipe_needs_no_weights(name, model, tmp_path, capsys):
    rows = model.parent / "rows.jsonl"
    words = f"--model {model} --dataset {rows} --dataset_config none --eval_dataset {rows} --eval_split none --use_cpu"
    servers = "--vllm_server_base_url http://127.0.0.1:8000,http://127.0.0.1:8001"
    more = f"{ON_ONE_CPU} {servers}" if name.endswith("4-2") else ""
    command = f"grpo --config {FOLDER / name}.yaml {words} --output_dir {tmp_path} --dry-run {more}"
    assert dispatch(command.split()) == 0
    printed = capsys.readouterr().out
    found = yaml.safe_load(printed[printed.index("arguments:") :])  # DeepSpeed prints a line when it is first imported
    lora = "lora" in name
    assert found["model"]["parameters"] == PARAMETERS + (ADAPTERS if lora else 0)
    assert found["model"]["trainable"] == (ADAPTERS if lora else PARAMETERS)
    assert found["rewards"] == {"numeric_match": 1.0, "hash_answer_format": 0.5}
    assert found["data"]["usable_prompts"] == 64
    assert ("vllm" in found) == name.endswith("4-2")

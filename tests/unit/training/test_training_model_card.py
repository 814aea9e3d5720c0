"""What a trainer writes about its model, and sends to the hub, after a real run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from fake_hub import serve_hub
from small_runs import SAVED, make, trained
from tiny_models import tiny_model

KWARGS = ["--model_init_kwargs", '{"token": "secret"}']
SCRIPT = Path(__file__).with_name("push_runs.py")
KINDS = ("GRPO", "PPO", "SFT", "Reward", "adapter")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub that has got a model of each trainer."""
    folder = tmp_path_factory.mktemp("runs")
    with serve_hub() as hub:
        hub_variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "secret", "HF_HOME": str(folder)}
        paths = os.pathsep.join([str(SCRIPT.parents[2]), *sys.path])
        words = ["--hub_token", "secret", "--seed=3", "hf_abcdefghijkl", *KWARGS]
        command = [sys.executable, str(SCRIPT), str(folder), *words]
        variables = {**os.environ, **hub_variables, "PYTHONPATH": paths}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr[-3000:]
        hub.runs = folder
        yield hub


def card(hub, name):
    return ModelCard(hub.files[f"someone/{name}"]["README.md"].decode())


@pytest.mark.parametrize("kind", KINDS)
def test_the_hub_gets_a_model_with_its_tokenizer_and_its_card(hub, kind):
    names = hub.files[f"someone/{kind}"].keys()
    weights = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
    assert {weights, "tokenizer.json", "README.md"} <= names
    assert not [name for name in names if name.startswith("checkpoint-")]


@pytest.mark.parametrize(
    ("kind", "algorithm", "paper"), [("GRPO", "GRPO", "2402.03300"), ("Reward", "reward", "2203.02155")]
)
def test_a_card_states_algorithm_paper_data_command_and_metrics(hub, kind, algorithm, paper):
    found = card(hub, kind)
    dataset = "someone/pairs" if kind == "Reward" else "someone/sums"
    assert f"with {algorithm}" in found.text
    assert f"https://huggingface.co/papers/{paper})" in found.text
    assert " 2 steps" in found.text
    assert f"[{dataset}](https://huggingface.co/datasets/{dataset})" in found.text
    assert found.data.datasets == dataset
    assert found.data.model_name == kind
    assert {"generated_from_trainer", "lowpeak"} <= set(found.data.tags)
    assert "python push_runs.py" in found.text
    assert "| `learning_rate` | 0.01 |" in found.text
    assert "| `train_loss` |" in found.text
    assert ("| `margin` |" if kind == "Reward" else "| `reward` |") in found.text


@pytest.mark.parametrize(
    ("kind", "algorithm", "paper"),
    [("RLOO", "RLOO", "2402.14740"), ("PPO", "PPO", "1707.06347"), ("OnlineDPO", "Online DPO", "2402.04792")],
)
def test_each_algorithm_has_its_name_and_paper(tmp_path, kind, algorithm, paper):
    make(kind, tmp_path).create_model_card()
    text = (tmp_path / "README.md").read_text()
    assert f"with {algorithm}" in text
    assert f"https://huggingface.co/papers/{paper})" in text


def test_every_run_and_all_that_it_saves_have_a_card_and_an_adapters_is_not_pefts(tmp_path):
    adapter = {"peft_config": LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"]), **SAVED}
    for kind, algorithm, changes in (("GRPO", "GRPO", adapter), ("SFT", "supervised fine-tuning", {})):
        folder = tmp_path / kind
        run = trained(kind, folder, **changes)
        run.save_model(str(folder / "saved"))
        run.save_merged_model(str(folder / "merged"))
        saved = ("", "saved", "merged", *(["checkpoint-1"] if changes else []))
        cards = {name: ModelCard.load(folder / name / "README.md") for name in saved}
        assert all(f"with {algorithm}" in each.text for each in cards.values())
        assert " 2 steps" in cards[""].text
        library = "peft" if changes else "transformers"
        assert [cards[name].data.library_name for name in ("saved", "merged")] == [library, "transformers"]


@pytest.mark.parametrize("change", ["", "My own notes.", "card"])
def test_only_a_card_that_nobody_changed_is_written_again(tmp_path, change):
    card = tmp_path / "README.md"
    run = make("SFT", tmp_path, **SAVED)
    if change == "card":
        run.create_model_card()
        change = card.read_text().replace("# ", "# My ", 1)
    if change:
        card.write_text(change)
    run.train()
    run.save_model()
    assert card.read_text() == change or (not change and " 2 steps" in card.read_text())
    (tmp_path / "checkpoint-2" / "README.md").write_text("My notes.")
    make("SFT", tmp_path, **SAVED, max_steps=3).train(resume_from_checkpoint=True)
    assert card.read_text() == change or (not change and " 3 steps" in card.read_text())


def test_a_card_of_supervised_training_has_its_loss(hub):
    found = card(hub, "SFT")
    assert " 2 steps" in found.text
    assert "| `loss` |" in found.text
    assert found.data.datasets is None


def test_tags_and_the_kind_of_model_are_in_the_cards_metadata(hub):
    assert {"math", "tiny", "reward"} <= set(card(hub, "Reward").data.tags)
    assert card(hub, "Reward").data.pipeline_tag == "text-classification"
    assert card(hub, "GRPO").data.library_name == "transformers"
    assert card(hub, "adapter").data.library_name == "peft"


def test_a_card_tells_no_token_and_no_folder(hub):
    for kind in KINDS:
        text = str(card(hub, kind))
        assert not [word for word in ("secret", "hf_abc", "hub_model_id") if word in text]
        assert "--hub_token '<hidden>' --seed=3 <hidden> --model_init_kwargs '{\"token\": \"<hidden>\"}'" in text


def test_no_file_that_is_pushed_or_saved_holds_a_token(hub):
    pushed = hub.files["someone/adapter"]
    saved = {str(path): path.read_bytes() for path in (hub.runs / "adapter").rglob("*") if path.is_file()}
    assert "training_args.bin" in pushed
    assert any(name.endswith("checkpoint-2/training_args.bin") for name in saved)
    assert [name for name, content in (pushed | saved).items() if b"secret" in content] == []


def test_every_save_is_pushed_and_what_was_pushed_can_be_loaded(hub, tmp_path):
    assert {"Training in progress, step 1", "Training in progress, step 2", "Model save"} <= set(hub.messages)
    for name, content in hub.files["someone/adapter"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert PeftModel.from_pretrained(tiny_model(), tmp_path).peft_config["default"].r == 2
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes(hub.files["someone/GRPO"][name])
    (tmp_path / "adapter_config.json").unlink()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 13

"""Data and adapters that cannot be used are told before any weights are read: here the model's folder has none."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

import lowpeak
from lowpeak.cli.main import main
from lowpeak.errors import ArgumentError, DataError, ModelError
from lowpeak.training.preflight import check_adapter
from small_runs import make
from tiny import char_tokenizer, tiny_model

ROWS = {"prompt": ["1="] * 8, "completion": ["1"] * 8, "chosen": ["1"] * 8, "rejected": ["2"] * 8}
TABLE, WRONG = Dataset.from_dict(ROWS), Dataset.from_dict({"question": ["1="] * 8})
EACH = pytest.mark.parametrize("trainer", ["GRPO", "RLOO", "PPO", "OnlineDPO", "SFT", "Reward"])


@pytest.fixture
def folder(tmp_path):
    """A folder with a model's config and tokenizer, without weights."""
    tiny_model().save_pretrained(tmp_path / "model")
    char_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    return tmp_path


def build(trainer, folder, data=TABLE, eval_data=None, **changes):
    return make(trainer, folder / "run", str(folder / "model"), data, False, eval_dataset=eval_data, **changes)


@EACH
def test_a_model_without_weights_is_told_where_all_else_is_right(folder, trainer):
    with pytest.raises(ModelError, match=r"cannot load '.*model'.*model\.safetensors"):
        build(trainer, folder, eval_data=TABLE, peft_config=LoraConfig(task_type=None), eval_strategy="steps")


@EACH
def test_wrong_columns_are_told_first(folder, trainer):
    with pytest.raises(DataError, match=r"^row 0 has .*'question'.*rename"):
        build(trainer, folder, WRONG)
    with pytest.raises(DataError, match=r"^eval_dataset: row 0 has .*'question'.*rename"):
        build(trainer, folder, eval_data=WRONG)
    with pytest.raises(DataError, match=r"^eval_dataset\['hard'\]: row 0 has .*'question'.*rename"):
        build(trainer, folder, eval_data={"easy": TABLE, "hard": WRONG})
    with pytest.raises(DataError, match="train_dataset"):
        build(trainer, folder, None)


@EACH
def test_an_evaluation_without_data_is_told_first(folder, trainer):
    with pytest.raises(ArgumentError, match=r"eval_strategy='steps'.*eval_dataset"):
        build(trainer, folder, eval_strategy="steps")


@EACH
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_modules": ["nope"]}, "'nope'"),
        ({"layers_to_transform": [9]}, "Target modules"),
        *(
            ({name: value}, f"{name}={value}")
            for name, value in (("r", 0), ("r", -1), ("lora_alpha", 0), ("lora_dropout", 1.5))
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_told_first(folder, trainer, changes, words):
    with pytest.raises(ArgumentError, match=rf"peft_config .*{words}"):
        build(trainer, folder, peft_config=LoraConfig(**changes))


@pytest.mark.parametrize("trainer", ["GRPO", "SFT"])
def test_an_adapter_for_another_task_is_told_first(folder, trainer):
    with pytest.raises(ArgumentError, match=r"peft_config .*task_type='SEQ_CLS'.*CAUSAL_LM"):
        build(trainer, folder, peft_config=LoraConfig(task_type="SEQ_CLS"))


def test_an_adapter_that_does_not_fit_an_instance_is_one_sentence(tmp_path):
    with pytest.raises(ArgumentError, match=r"peft_config .*\(Target modules"):
        make("SFT", tmp_path, peft_config=LoraConfig(target_modules=["nope"]))


def test_looking_whether_an_adapter_fits_draws_no_random_number(folder):
    from transformers import AutoModelForCausalLM

    args, before = lowpeak.SFTConfig(output_dir=str(folder), use_cpu=True), torch.get_rng_state()
    check_adapter(LoraConfig(target_modules="all-linear"), str(folder / "model"), AutoModelForCausalLM, args)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_command_says_first_that_there_is_nothing_to_resume_from(folder, capsys):
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": "1+", "completion": "1"}) + "\n" for _ in range(8))
    )
    words = ["sft", "--model", f"{folder}/model", "--dataset", f"{folder}/rows.jsonl", "--output_dir", f"{folder}/out"]
    for given, sentence in (
        ("true", "checkpoint-N"),
        (f"{folder}/no", f"{folder}/no"),
    ):
        assert main([*words, "--use_cpu", "--resume_from_checkpoint", given]) == 2
        assert sentence in capsys.readouterr().err

"""Things of the wrong kind, passed to a trainer by mistake, are told at once: they would fail far away or do nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainingArguments

from lowpeak import GRPOConfig, GRPOTrainer, RLOOConfig, SFTConfig, SFTTrainer
from lowpeak.errors import ArgumentError, CheckpointError, DataError, ModelError
from tiny import char_tokenizer, tiny_model

SMALL = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 5,
    "max_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "report_to": "none",
}
TABLE = Dataset.from_list([{"prompt": f"{i}="} for i in range(8)])


def ones(completions, **columns):
    return [float(completion.count("1")) for completion in completions]


def grpo(tmp_path, model=None, data=TABLE, tokenizer=None, args=None, **changes):
    args = args or GRPOConfig(output_dir=str(tmp_path), **{**SMALL, **changes})
    return GRPOTrainer(model or tiny_model(), ones, args, data, processing_class=tokenizer or char_tokenizer())


def sft(tmp_path, model=None, tokenizer=None, rows=({"text": "12"},)):
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    tokenizer = tokenizer or char_tokenizer()
    return SFTTrainer(
        model or tiny_model(), args, train_dataset=Dataset.from_list(list(rows)), processing_class=tokenizer
    )


@pytest.mark.parametrize("make", [grpo, sft])
def test_a_model_without_a_trainable_weight_is_told(tmp_path, make):
    frozen = tiny_model().requires_grad_(False)
    with pytest.raises(ModelError, match=r"trainable.*call requires_grad_\(True\)"):
        make(tmp_path, frozen)


def test_an_adapter_loaded_for_inference_is_told(tmp_path):
    get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"is_trainable=True"):
        grpo(tmp_path, loaded)
    grpo(tmp_path, PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter", is_trainable=True))


@pytest.mark.parametrize("model", [5, Path("some/folder")])
def test_a_model_of_another_kind_is_told(tmp_path, model):
    with pytest.raises(ModelError):
        grpo(tmp_path, model)


def test_a_tokenizer_by_name_is_told(tmp_path):
    with pytest.raises(ModelError, match=r"processing_class is 'some/name'"):
        grpo(tmp_path, tokenizer="some/name")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("rows.jsonl", "The data set is a str; make it one with datasets.load_dataset"),
        ({"prompt": ["1="]}, r"The data set is a dict; make it one with datasets.Dataset.from_dict\("),
        (
            pd.DataFrame({"prompt": ["1="]}),
            r"The data set is a DataFrame; make it one with datasets.Dataset.from_pandas",
        ),
    ],
)
def test_a_data_set_of_another_kind_is_told(tmp_path, data, words):
    with pytest.raises(DataError, match=words):
        grpo(tmp_path, data=data)


def test_a_token_that_the_model_does_not_embed_is_told_with_its_row(tmp_path):
    wide = char_tokenizer("0123456789=ab")
    with pytest.raises(DataError, match=r"row 1 .* 14, .* 13"):
        grpo(tmp_path, data=Dataset.from_list([{"prompt": "1="}, {"prompt": "b="}]), tokenizer=wide)
    with pytest.raises(DataError, match=r"row 1 .* 13, .* 13 tokens"):
        sft(tmp_path, tokenizer=wide, rows=({"text": "1"}, {"text": "a"}))
    grpo(tmp_path, tokenizer=wide)  # a tokenizer may know more than the model, as Gemma's does


@pytest.mark.parametrize("args", [RLOOConfig, TrainingArguments])
def test_arguments_of_another_trainer_are_told(tmp_path, args):
    with pytest.raises(ArgumentError, match=rf"{args.__name__}; .* lowpeak.GRPOConfig"):
        grpo(tmp_path, args=args(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(ArgumentError, match=r"\.SFTConfig"):
        SFTTrainer(tiny_model(), {"output_dir": "x"}, train_dataset=TABLE, processing_class=char_tokenizer())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_generations": "4"}, "num_generations='4' must be a whole number, not a str"),
        ({"num_generations": 4.0}, "num_generations=4.0 must be a whole number, not a float"),
        ({"micro_batch_tokens": 512.5}, "micro_batch_tokens=512.5 must be a whole number or None, not a float"),
        ({"learning_rate": "1e-3"}, "learning_rate='1e-3' must be a number, not a str"),
        ({"max_completion_length": None}, "max_completion_length=None must be a whole number, not a NoneType"),
        ({"log_completions": "no"}, "log_completions='no' must be True or False, not a str"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be a finite number of 0 or more"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be at least 1"),
        ({"seed": -1}, r"seed=-1 must be from 0 to 2\*\*32 - 1"),
        ({"reward_weights": "12"}, "reward_weights='12' must be a list of numbers"),
    ],
)
def test_a_value_of_another_type_is_told(tmp_path, changes, words):
    with pytest.raises(ArgumentError, match=words):
        grpo(tmp_path, **changes)


def test_arguments_may_be_copied_with_a_change(tmp_path):
    args = dataclasses.replace(GRPOConfig(output_dir=str(tmp_path), **SMALL), learning_rate=1e-4)
    assert grpo(tmp_path, args=args).args.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"beta": 0.1},
            "is in the middle of a rollout, whose rows have no reference, which was not needed then: resume with the arguments",
        ),
        ({"num_generations": 8}, "num_generations was 4 and is 8"),
    ],
)
def test_a_rollout_in_use_that_other_arguments_made_is_told(tmp_path, changes, words):
    reused = {"steps_per_generation": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    grpo(tmp_path, **reused).train()
    with pytest.raises(CheckpointError, match=words):
        grpo(tmp_path, **reused, **changes).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

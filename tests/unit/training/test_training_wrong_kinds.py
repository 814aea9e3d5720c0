"""Things of the wrong kind, passed to a trainer by mistake, are told at once: they would fail far away or do nothing."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainingArguments

from lowpeak import GRPOConfig, GRPOTrainer, RLOOConfig, SFTTrainer
from lowpeak.errors import ArgumentError, CheckpointError, DataError, ModelError
from small_runs import TOKENIZER, make, ones, rows, trained
from tiny import char_tokenizer, tiny_model

grpo, sft = partial(make, "GRPO"), partial(make, "SFT")


@pytest.mark.parametrize("kind", ["GRPO", "SFT"])
def test_a_model_without_a_trainable_weight_is_told(tmp_path, kind):
    with pytest.raises(ModelError, match=r"trainable.*requires_grad_\(True\)"):
        make(kind, tmp_path, tiny_model().requires_grad_(False))


def test_an_adapter_loaded_for_inference_is_told(tmp_path):
    get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"is_trainable=True"):
        grpo(tmp_path, PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter"))
    grpo(tmp_path, PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter", is_trainable=True))


@pytest.mark.parametrize("model", [5, Path("some/folder")])
def test_a_model_of_another_kind_is_told(tmp_path, model):
    with pytest.raises(ModelError):
        grpo(tmp_path, model)


def test_a_tokenizer_by_name_is_told(tmp_path):
    with pytest.raises(ModelError, match=r"processing_class .*'some/name'"):
        grpo(tmp_path, tokenizer="some/name")


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ("rows.jsonl", r" str; .*datasets\.load_dataset"),
        ({"prompt": ["1="]}, r" dict; .*datasets\.Dataset\.from_dict\("),
        (pd.DataFrame({"prompt": ["1="]}), r" DataFrame; .*datasets\.Dataset\.from_pandas"),
    ],
)
def test_a_data_set_of_another_kind_is_told(tmp_path, data, names):
    with pytest.raises(DataError, match=names):
        grpo(tmp_path, data=data)


def test_a_token_that_the_model_does_not_embed_is_told_with_its_row(tmp_path):
    wide = char_tokenizer("0123456789=ab")
    with pytest.raises(DataError, match=r"row 1 .* 14, .* 13"):
        grpo(tmp_path, data=Dataset.from_list([{"prompt": "1="}, {"prompt": "b="}]), tokenizer=wide)
    with pytest.raises(DataError, match=r"row 1 .* 13, .* 13 "):
        sft(tmp_path, data=Dataset.from_list([{"text": "1"}, {"text": "a"}]), tokenizer=wide)
    grpo(tmp_path, tokenizer=wide)  # a tokenizer may know more than the model, as Gemma's does


@pytest.mark.parametrize("args", [RLOOConfig, TrainingArguments])
def test_arguments_of_another_trainer_are_told(tmp_path, args):
    with pytest.raises(ArgumentError, match=rf"{args.__name__}; .* lowpeak.GRPOConfig"):
        GRPOTrainer(tiny_model(), ones, args(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(ArgumentError, match=r"\.SFTConfig"):
        SFTTrainer(tiny_model(), {"output_dir": "x"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_generations", "4"), ("num_generations", 4.0), ("micro_batch_tokens", 512.5), ("learning_rate", "1e-3")),
        *(("max_completion_length", None), ("log_completions", "no"), ("learning_rate", float("nan"))),
        *(("gradient_accumulation_steps", 0), ("seed", -1), ("reward_weights", "12")),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_told(tmp_path, name, value):
    with pytest.raises(ArgumentError, match=re.escape(f"{name}={value!r} ")):
        grpo(tmp_path, **{name: value})


def test_arguments_may_be_copied_with_a_change(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", max_completion_length=5)
    changed = dataclasses.replace(args, learning_rate=1e-4)
    run = GRPOTrainer(tiny_model(), ones, changed, rows(), processing_class=TOKENIZER)
    assert run.args.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("changes", "names"),
    [({"beta": 0.1}, "checkpoint-2.*reference"), ({"num_generations": 8}, "num_generations .*4 .*8")],
)
def test_a_rollout_in_use_that_other_arguments_made_is_told(tmp_path, changes, names):
    reused = {"steps_per_generation": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trained("GRPO", tmp_path, **reused)
    with pytest.raises(CheckpointError, match=names):
        trained("GRPO", tmp_path, **reused, **changes, resume=tmp_path / "checkpoint-2")

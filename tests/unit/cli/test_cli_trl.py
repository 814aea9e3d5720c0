"""TRL's command lines and YAML files: the same words after `lowpeak` mean what they mean after `trl`."""

from __future__ import annotations

import json
import os

import pytest
from datasets import Dataset, DatasetDict
from test_cli_train import trainer_of

from lowpeak.cli.train import run_training
from lowpeak.errors import ArgumentError


def trl_yaml(folder, **more):
    lines = {
        "model_name_or_path": "m",
        "dtype": "bfloat16",
        "attn_implementation": "sdpa",
        "dataset_name": f"{folder}/data",
        "dataset_train_split": "train",
        "dataset_test_split": "test",
        "reward_funcs": [f"{folder}/judge.py:right"],
        "output_dir": f"{folder}/out",
        "use_cpu": True,
        **more,
    }
    (folder / "trl.yaml").write_text(json.dumps(lines))  # JSON is YAML
    return ["--config", f"{folder}/trl.yaml"]


@pytest.fixture
def splits(folder):
    """A folder with the splits train and test, which `save_to_disk` wrote."""
    halves = {name: Dataset.from_list([{"prompt": f"{name} {i}"} for i in range(4)]) for name in ("train", "test")}
    DatasetDict(halves).save_to_disk(str(folder / "data"))
    return folder


def test_a_yaml_file_of_trl_is_read_as_it_is(library, splits):
    words = trl_yaml(
        splits,
        reward_model_name_or_path="judge",
        eval_strategy="steps",
        use_peft=True,
        lora_r=8,
        lora_modules_to_save=["lm_head"],
        use_rslora=True,
        lora_task_type="CAUSAL_LM",
        per_device_eval_batch_size=8,
        ignore_bias_buffers=False,
        env={"LOWPEAK_OF_A_TEST": 3},
    )
    try:
        made = trainer_of("grpo", words, library).keywords
        assert os.environ["LOWPEAK_OF_A_TEST"] == "3"
    finally:
        os.environ.pop("LOWPEAK_OF_A_TEST", None)
    assert made["model"] == "m"
    assert made["args"].model_init_kwargs == {"dtype": "bfloat16", "attn_implementation": "sdpa"}
    assert made["train_dataset"]["prompt"][0] == "train 0"
    assert made["eval_dataset"]["prompt"][0] == "test 0"
    assert made["reward_funcs"][0] == "judge"
    assert made["reward_funcs"][1]([""]) == [1.0]
    adapters = made["peft_config"]
    assert (adapters.r, adapters.use_rslora, adapters.modules_to_save) == (8, True, ["lm_head"])


def test_trls_defaults_may_be_spelled_out(library, splits):
    defaults = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "use_dora": False, "model_revision": "main"}
    words = trl_yaml(splits, **defaults, per_device_eval_batch_size=8, bnb_4bit_quant_type="nf4", strict_arguments=True)
    assert trainer_of("grpo", words, library).calls


def test_an_evaluation_reads_the_split_test_if_none_is_named(library, splits):
    words = trl_yaml(splits)
    assert trainer_of("grpo", words, library).keywords["eval_dataset"] is None
    evaluated = trainer_of("grpo", [*words, "--eval_strategy", "steps"], library).keywords["eval_dataset"]
    assert evaluated["prompt"][0] == "test 0"


def test_the_command_line_overrides_the_file_under_either_name(library, splits):
    words = trl_yaml(splits)
    for name in ("--model", "--model_name_or_path", "--model-name-or-path"):
        assert trainer_of("grpo", [*words, name, "n"], library).keywords["model"] == "n"


def mixture(folder, *entries, **more):
    words = trl_yaml(folder, datasets=[{"path": f"{folder}/{name}.jsonl", **entry} for name, entry in entries], **more)
    config = json.loads((folder / "trl.yaml").read_text())
    for name in ("dataset_name", "dataset_test_split"):
        del config[name]
    (folder / "trl.yaml").write_text(json.dumps(config))
    return words


@pytest.fixture
def files(folder):
    for name, count in (("a", 6), ("b", 3)):
        rows = [{"prompt": f"{name}{i}", "more": i} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("first", "second", "prompts"),
    [
        ({}, {}, "a0 a1 a2 a3 a4 a5 b0 b1 b2"),
        ({"split": "train[:2]"}, {"columns": ["prompt", "more"]}, "a0 a1 b0 b1 b2"),
        # Half each: three rows of each are all that b has.
        ({"fraction": 0.5}, {"fraction": 0.5}, "a0 a1 a2 b0 b1 b2"),
        ({"fraction": 3}, {"fraction": 1}, "a0 a1 a2 a3 a4 a5 b0 b1"),
    ],
)
def test_a_mixture_concatenates_its_datasets(library, files, first, second, prompts):
    made = trainer_of("grpo", mixture(files, ("a", first), ("b", second)), library).keywords
    assert " ".join(made["train_dataset"]["prompt"]) == prompts


def test_a_mixture_on_the_command_line_is_paths_or_json(library, files):
    one, two = f"{files}/a.jsonl", json.dumps({"path": f"{files}/b.jsonl", "split": "train[:1]"})
    words = ["--model", "m", "--reward_funcs", f"{files}/judge.py:right", "--output_dir", f"{files}/out", "--use_cpu"]
    made = trainer_of("grpo", [*words, "--datasets", one, two], library).keywords
    assert made["train_dataset"]["prompt"] == [f"a{i}" for i in range(6)] + ["b0"]


def test_held_out_rows_are_evaluated_on(library, files):
    words = mixture(files, ("a", {}), ("b", {}), test_split_size=0.34, eval_strategy="steps")
    made = trainer_of("grpo", words, library).keywords
    assert (len(made["train_dataset"]), len(made["eval_dataset"])) == (5, 4)
    again = trainer_of("grpo", words, library).keywords
    assert again["eval_dataset"]["prompt"] == made["eval_dataset"]["prompt"]


def test_streams_are_mixed_too(library, files):
    made = trainer_of("grpo", mixture(files, ("a", {}), ("b", {}), streaming=True, max_steps=1), library).keywords
    assert [row["prompt"] for row in made["train_dataset"]][5:7] == ["a5", "b0"]


@pytest.mark.parametrize(
    ("entries", "more", "message"),
    [
        ([("a", {"weight": 1})], [], "weight"),
        ([("a", {})], ["--datasets", '{"path": '], "--datasets"),
        ([("a", {"fraction": 1}), ("b", {})], [], "fraction"),
        ([("a", {"columns": ["prompt"]}), ("b", {"columns": ["nope"]})], [], "nope"),
        ([("a", {})], ["--dataset_name", "other"], "--dataset .*--datasets"),
        ([("a", {})], ["--test_split_size", "60"], "--test_split_size 60"),
        ([("a", {})], ["--test_split_size", "1", "--eval_split", "dev"], "--eval_split"),
        ([("a", {})], ["--eval_strategy", "steps", "--eval_split", "dev"], "--eval_split dev .*--eval_dataset"),
        ([("a", {})], ["--test_split_size", "1", "--streaming"], "--streaming"),
        ([("a", {})], ["--test_split_size", "1", "--strict_arguments"], "test_split_size=1.*never evaluates.*: 1;"),
        ([("a", {})], ["--model_init_kwargs", '{"dtype": "float32"}'], "'dtype'"),
    ],
)
def test_data_that_contradict_themselves_are_one_sentence(library, files, entries, more, message):
    with pytest.raises(ArgumentError, match=message):
        run_training("grpo", [*mixture(files, *entries), *more], library)


def test_an_argument_under_both_names_is_an_error(library, splits):
    with pytest.raises(ArgumentError, match=r"model_name_or_path .*model "):
        run_training("grpo", trl_yaml(splits, model="n"), library)

"""A command line and its files: names, values of every kind, what is refused, and help."""

from __future__ import annotations

import dataclasses
import re

import pytest
from transformers.trainer_utils import IntervalStrategy

from lowpeak.cli.arguments import ModelArguments, RewardArguments
from lowpeak.cli.output import to_yaml
from lowpeak.cli.parser import HELP_GROUPS, argument_names, parse_arguments
from lowpeak.errors import ArgumentError
from lowpeak.rewards.factory import BUILTIN_REWARDS, REWARD_FACTORIES
from lowpeak.trainers.configs import GRPOConfig

KINDS = (ModelArguments, GRPOConfig)


def given(*argv):
    return parse_arguments(KINDS, argv, "lowpeak grpo")


def write(folder, text):
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--learning_rate 1e-6 --model m", {"learning_rate": 1e-6, "model": "m"}),
        ("--learning-rate=1e-6 --model a-model-b", {"learning_rate": 1e-6, "model": "a-model-b"}),
        ("--log_completions --use_peft false", {"log_completions": True, "use_peft": False}),
        ("--lora_target_modules a b", {"lora_target_modules": ["a", "b"]}),
        ("--lora_target_modules a --lora_target_modules b", {"lora_target_modules": ["a", "b"]}),
        ("--report_to wandb trackio --report_to none", {"report_to": "none"}),
        ("--seed -1", {"seed": -1}),
        ("--report_to none --logging_steps 0.5 --warmup_steps 3",
         {"report_to": "none", "logging_steps": 0.5, "warmup_steps": 3}),
    ],
)  # fmt: skip
def test_only_what_was_given_is_passed_on_with_its_type(words, expected):
    assert given(*words.split()) == expected


def test_a_later_file_overrides_those_before_and_the_command_line_all(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("learning_rate: 1e-5\nnum_generations: 4\nseed: 1\n")
    second.write_text("learning_rate: 2e-5\nbeta: 0\nseed: 2\n")
    files = given("--config", str(first), "--config", str(second), "--seed", "3")
    assert files == {"learning_rate": 2e-5, "num_generations": 4, "beta": 0, "seed": 3}


@pytest.mark.parametrize(
    "argv", [("--hub_token", "X", "S3CRET"), ("--hub-token=X", "S3CRET"), ("--config", "run.yaml")]
)
def test_a_token_is_not_repeated(argv, tmp_path, monkeypatch):
    write(tmp_path, "hub_token: {a: S3CRET}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="hub_token") as refused:
        given(*argv)
    assert "S3CRET" not in str(refused.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learning_rte", "1"], "'learning_rte'.*'learning_rate'"),
        (["--use_liger_loss", "true"], "'use_liger_loss'"),
        (["--num_generations", "many"], "^--num_generations must be of type integer, got 'many'"),
        (["--num_generations", "2.5"], r"^--num_generations must be of type integer, got '2\.5'"),
        (["--num_generations", "inf"], "^--num_generations must be of type integer, got 'inf'"),
        (["--learning_rate", "abc"], "^--learning_rate must be of type float, got 'abc'"),
        (["--rollout_batch_size", "8"], r"'rollout_batch_size'; --help .* help\(\) of the config"),
        (["--logging_dir", "logs"], "'logging_dir' .* TENSORBOARD_LOGGING_DIR"),
        (["--loss_type"], "--loss_type"),
        (["gpt2"], "'gpt2'"),
        (["--config", "nowhere.yaml"], r"nowhere\.yaml"),
        (["--learning", "1"], "'learning'"),
        (["--model_init_kwargs", '{"a": ' + "[" * 100_000], "--model_init_kwargs"),
    ],
)
def test_what_cannot_be_meant_is_one_clear_error(argv, message):
    with pytest.raises(ArgumentError, match=message):
        given(*argv)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("learning_rte: 1", "'learning_rte'.*'learning_rate'"),
        ("num_generations: 2.5", r"num_generations.*2\.5"),
        ("num_generations: [2]", "num_generations"),
    ],
)
def test_an_error_in_the_file_names_the_file(tmp_path, text, pattern):
    with pytest.raises(ArgumentError, match=rf"run\.yaml.*{pattern}"):
        given("--config", write(tmp_path, text))


def test_help_lists_every_argument_in_its_group(capsys):
    with pytest.raises(SystemExit) as left:
        given("--help")
    assert left.value.code == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"\n{title}:\n") for title in HELP_GROUPS if title not in ("data", "rewards")]
    assert places == sorted(places)
    inert = {"do_train", "fp16", "dataloader_num_workers", "dataset_num_proc", "remove_unused_columns"}
    assert not any(f"--{name} " in shown for name in inert)
    assert all(
        f"--{name} " in shown for name in ("bf16", "seed", "dataloader_pin_memory", *argument_names(ModelArguments))
    )
    assert "%%" not in shown
    assert "  Colocated: fraction of the device's" in shown
    assert "  vLLM" not in shown.partition("generation:")[0]
    generation = shown[shown.index("\ngeneration:\n") : shown.index("\nalgorithm:\n")]
    assert "--num_generations INT" in generation
    assert "--beta" not in generation


def test_help_all_lists_every_argument(capsys):
    for word in ("--help-all", "--help_all"):
        with pytest.raises(SystemExit):
            given(word)
        shown = capsys.readouterr().out
        assert all(f"--{name} " in shown for kind in KINDS for name in argument_names(kind))
    assert "~20% slower" in shown


def test_help_names_every_built_in_reward(capsys):
    with pytest.raises(SystemExit):
        parse_arguments((RewardArguments,), ["--help"], "lowpeak grpo")
    shown = " ".join(capsys.readouterr().out.split())
    assert all(re.search(rf"\b{name}\b", shown) for name in (*BUILTIN_REWARDS, *REWARD_FACTORIES))


@dataclasses.dataclass
class Several:
    """Arguments of every kind of hint that configurations have."""

    whole: int = 1
    number: float | None = None
    switch: bool | None = None
    text: str | None = None
    scale: str | bool = "group"
    size: int | str | None = None
    words: str | list[str] | None = None
    numbers: list[float] | None = None
    weights: float | list[float] = 1.0
    pair: tuple[float, float] | None = None
    speed: IntervalStrategy | str = "no"
    mapping: dict | None = None
    mapping_or_file: dict | str | None = None
    hub_token: str | None = None


def several(*argv):
    return parse_arguments([Several], argv, "lowpeak test")


@pytest.mark.parametrize(
    ("name", "word", "yaml", "value"),
    [
        ("whole", "3", 3, 3),
        ("whole", "1e3", 1000.0, 1000),
        ("whole", str(2**53 + 1), 2**53 + 1, 2**53 + 1),
        ("number", "1e-6", 1e-6, 1e-6),
        ("number", "2", 2, 2.0),
        ("number", "none", None, None),
        ("switch", "true", True, True),
        ("switch", "off", False, False),
        ("switch", "none", None, None),
        ("text", "none", None, None),
        ("scale", "group", "group", "group"),
        ("scale", "false", False, False),
        ("size", "8GiB", "8GiB", "8GiB"),
        ("words", "one", "one", "one"),
        ("words", "one", ["one"], "one"),
        ("words", ["one", "two"], ["one", "two"], ["one", "two"]),
        ("numbers", "0.5", 0.5, [0.5]),
        ("weights", "0.5", [0.5], [0.5]),
        ("speed", "steps", "steps", "steps"),
        ("speed", "no", False, "no"),
        ("mapping", '{"a": 1}', {"a": 1}, {"a": 1}),
        ("mapping_or_file", '{"a": 1}', {"a": 1}, {"a": 1}),
        ("mapping_or_file", "file.json", "file.json", "file.json"),
    ],
)
def test_a_word_and_a_yaml_value_become_what_the_hint_asks_for(tmp_path, name, word, yaml, value):
    path = write(tmp_path, to_yaml({name: yaml}))
    for given_by in ([f"--{name}", *([word] if isinstance(word, str) else word)], ["--config", path]):
        found = several(*given_by)[name]
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "yaml"),
    [
        ("whole", 3.5),
        ("whole", True),
        ("whole", None),
        ("whole", [1]),
        ("number", "fast"),
        ("number", {"a": 1}),
        ("switch", "perhaps"),
        ("speed", "fast"),
        ("numbers", ["x"]),
        ("mapping", "[1]"),
        ("mapping_or_file", "[1]"),
        ("mapping_or_file", "{bad"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, name, yaml):
    with pytest.raises(ArgumentError, match=name):
        several("--config", write(tmp_path, to_yaml({name: yaml})))
    if isinstance(yaml, str):
        with pytest.raises(ArgumentError, match=name):
            several(f"--{name}", yaml)

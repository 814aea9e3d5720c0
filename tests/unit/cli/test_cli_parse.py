from __future__ import annotations

import pytest

from lowpeak.cli.arguments import ModelArguments
from lowpeak.cli.groups import GENERATION, ORDER
from lowpeak.cli.parse import Argument, arguments_of, parse
from lowpeak.errors import ArgumentError
from lowpeak.training.arguments import GRPOConfig

ARGUMENTS = [*arguments_of(ModelArguments, "model"), *arguments_of(GRPOConfig)]


def given(*argv):
    return parse(ARGUMENTS, argv, "lowpeak grpo")


def write(folder, text):
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_only_what_was_given_is_passed_on():
    assert given() == {}
    assert given("--learning_rate", "1e-6", "--model", "m") == {"learning_rate": 1e-6, "model": "m"}


def test_the_command_line_overrides_the_file(tmp_path):
    path = write(tmp_path, "learning_rate: 1e-5\nnum_generations: 4\n")
    assert given("--config", path, "--learning_rate", "2e-5") == {"learning_rate": 2e-5, "num_generations": 4}


def test_of_several_files_a_later_one_overrides_those_before(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("learning_rate: 1e-5\nnum_generations: 4\n")
    second.write_text("learning_rate: 2e-5\nbeta: 0\n")
    files = given("--config", str(first), "--config", str(second))
    assert files == {"learning_rate": 2e-5, "num_generations": 4, "beta": 0}


@pytest.mark.parametrize("argv", [("--hub_token", "X", "S3CRET"), ("--hub-token=X", "S3CRET")])
def test_a_word_behind_a_token_is_not_repeated(argv):
    with pytest.raises(ArgumentError, match="A word behind --hub_token belongs to no argument") as refused:
        given(*argv)
    assert "S3CRET" not in str(refused.value)


def test_a_token_of_the_wrong_kind_is_not_repeated(tmp_path):
    with pytest.raises(ArgumentError, match="hub_token expects a string, not <hidden>") as refused:
        given("--config", write(tmp_path, "hub_token: {a: S3CRET}"))
    assert "S3CRET" not in str(refused.value)


def test_a_number_means_the_same_in_the_file_and_on_the_command_line(tmp_path):
    path = write(tmp_path, "learning_rate: 1e-6\neval_strategy: no\nreward_weights: [1, 0.5]\nbeta: 0\n")
    line = given("--learning_rate", "1e-6", "--eval_strategy", "no", "--reward_weights", "1", "0.5", "--beta", "0")
    assert given("--config", path) == line


def test_a_value_that_nests_too_deeply_is_an_error():
    with pytest.raises(ArgumentError, match="--model_init_kwargs nests lists or mappings too deeply; correct it"):
        given("--model_init_kwargs", '{"a": ' + "[" * 100_000)


def test_dashes_are_underscores_in_names_and_stay_in_values():
    assert given("--learning-rate=1e-6", "--model", "a-model-b") == {"learning_rate": 1e-6, "model": "a-model-b"}


def test_a_switch_is_on_by_its_name_alone():
    assert given("--log_completions", "--use_peft", "false") == {"log_completions": True, "use_peft": False}


def test_a_list_is_given_at_once_or_one_by_one():
    assert given("--lora_target_modules", "a", "b") == given("--lora_target_modules", "a", "--lora_target_modules", "b")


def test_a_negative_number_is_a_value():
    assert given("--seed", "-1") == {"seed": -1}


def test_the_rest_of_transformers_arguments_are_there():
    assert given("--report_to", "none", "--logging_steps", "0.5", "--warmup_steps", "3") == {
        "report_to": "none",
        "logging_steps": 0.5,
        "warmup_steps": 3,
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learning_rte", "1"], "did you mean 'learning_rate'"),
        (["--use_liger_loss", "true"], "'use_liger_loss' is TRL's"),
        (["--model_name_or_path", "m"], "use model"),
        (["--num_generations", "many"], "--num_generations expects a whole number, not 'many'"),
        (["--loss_type"], "[Ee]xpected one argument"),
        (["gpt2"], "'gpt2' belongs to no argument"),
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--learning", "1"], "Unknown argument 'learning'"),
    ],
)
def test_what_cannot_be_meant_is_one_clear_error(argv, message):
    with pytest.raises(ArgumentError, match=message):
        given(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rte: 1", "run.yaml.*did you mean 'learning_rate'"),
        ("num_generations: 2.5", "run.yaml: num_generations expects a whole number"),
        ("num_generations: [2]", "run.yaml: num_generations .*not a list"),
    ],
)
def test_an_error_in_the_file_names_the_file(tmp_path, text, message):
    with pytest.raises(ArgumentError, match=message):
        given("--config", write(tmp_path, text))


def test_help_lists_every_argument_in_its_group(capsys):
    with pytest.raises(SystemExit) as left:
        given("--help")
    assert left.value.code == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"\n{title}:\n") for title in ORDER if title not in ("data", "rewards")]
    assert places == sorted(places)
    assert all(f"--{argument.name} " in shown for argument in ARGUMENTS)
    generation = shown[shown.index("\ngeneration:\n") : shown.index("\nalgorithm:\n")]
    assert "--num_generations INT" in generation
    assert "--beta" not in generation


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("LoRA: send the adapter alone.", "LoRA: send the adapter alone"),
        ("True: gather all.", "True: gather all"),
        ("Hugging Face's space.", "Hugging Face's space"),
        ("vLLM's own arguments.", "vLLM's own arguments"),
        ("model to train", "Model to train"),
    ],
)
def test_help_writes_names_as_they_are(capsys, text, shown):
    with pytest.raises(SystemExit):
        parse([Argument("name", str, GENERATION, None, text)], ["--help"], "lowpeak test")
    assert f"  {shown}\n" in capsys.readouterr().out

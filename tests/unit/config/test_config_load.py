"""Reading YAML and checking argument names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lowpeak.config.load import check_names, load_yaml, merge
from lowpeak.errors import ArgumentError


def write(folder, text):
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_settings_come_back_with_their_types(tmp_path):
    path = write(tmp_path, "model: tiny\nlearning_rate: 1e-6\nbeta: .5\nbf16: true\nseed: 3\nkwargs: {a: [1, 2]}\n")
    assert load_yaml(path) == {
        "model": "tiny",
        "learning_rate": 1e-6,
        "beta": 0.5,
        "bf16": True,
        "seed": 3,
        "kwargs": {"a": [1, 2]},
    }


@pytest.mark.parametrize("text", ["1e-6", "5E-7", "-2e3", "1.e5", "+.5e-2"])
def test_exponents_without_a_dot_are_numbers(tmp_path, text):
    assert load_yaml(write(tmp_path, f"x: {text}"))["x"] == float(text)


@pytest.mark.parametrize("text", ["1e", "e5", "1e-6b", "2026-01-02e", "'1e-6'"])
def test_text_that_only_looks_like_an_exponent_stays_text(tmp_path, text):
    assert load_yaml(write(tmp_path, f"x: {text}"))["x"] == text.strip("'")


def test_an_empty_file_sets_nothing(tmp_path):
    assert load_yaml(write(tmp_path, "# nothing yet\n")) == {}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"none\.yaml does not exist"):
        load_yaml(tmp_path / "none.yaml")


def test_a_folder_is_not_a_config_file(tmp_path):
    with pytest.raises(ArgumentError, match="cannot be read"):
        load_yaml(tmp_path)


def test_a_file_that_nests_too_deeply_is_an_error(tmp_path):
    with pytest.raises(ArgumentError, match=r"run\.yaml nests lists or mappings too deeply; correct it"):
        load_yaml(write(tmp_path, "a: " + "[" * 3000 + "]" * 3000))


def test_a_file_that_is_not_text_is_an_error(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"a: \xff\xfe\x00")
    with pytest.raises(ArgumentError, match="cannot be read"):
        load_yaml(path)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", "3\n", "1: 2\n"])
def test_a_file_without_names_is_an_error(tmp_path, text):
    with pytest.raises(ArgumentError, match="must hold lines `name: value`"):
        load_yaml(write(tmp_path, text))


def test_bad_yaml_is_reported_with_its_line(tmp_path):
    with pytest.raises(ArgumentError, match=r"line 2, mapping values are not allowed"):
        load_yaml(write(tmp_path, "a: 1\nb: 2: 3\n"))


def test_a_date_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(ArgumentError, match="not valid YAML: month must be"):
        load_yaml(write(tmp_path, "a: 2026-13-01\n"))


def test_a_key_that_stands_twice_is_reported_with_its_line(tmp_path):
    with pytest.raises(ArgumentError, match=r"line 3, the key 'beta' stands twice"):
        load_yaml(write(tmp_path, "beta: 0.1\nseed: 1\nbeta: 0.2\n"))


def test_no_code_runs_from_a_config_file(tmp_path):
    with pytest.raises(ArgumentError, match="not valid YAML"):
        load_yaml(write(tmp_path, "a: !!python/object/apply:os.getcwd []\n"))


def test_an_override_replaces_the_whole_value_and_changes_neither_input():
    defaults, overrides = {"a": 1, "kwargs": {"x": 1}}, {"kwargs": {"y": 2}}
    assert merge(defaults, overrides) == {"a": 1, "kwargs": {"y": 2}}
    assert (defaults, overrides) == ({"a": 1, "kwargs": {"x": 1}}, {"kwargs": {"y": 2}})


def test_known_names_pass():
    check_names(["beta", "seed"], {"beta", "seed", "epsilon"})


def test_each_unknown_name_is_named_with_the_closest_known_one():
    with pytest.raises(ArgumentError) as caught:
        check_names(["num_generation", "beta", "zzz"], {"beta", "num_generations"})
    assert str(caught.value) == (
        "Unknown argument 'num_generation'; did you mean 'num_generations'? "
        "Unknown argument 'zzz'; see --help for those there are."
    )


def test_a_name_of_trl_is_rejected_with_what_to_do_instead():
    with pytest.raises(ArgumentError, match=r"'max_prompt_length' is TRL's .*: set overlong_prompts\."):
        check_names(["max_prompt_length"], {"overlong_prompts"}, {"max_prompt_length": "set overlong_prompts"})


def test_loading_a_config_file_loads_no_torch(tmp_path):
    path = write(tmp_path, "a: 1\n")
    code = f"import sys; from lowpeak.config import load; load.load_yaml({str(path)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"

"""Rewards and judges by their names on a command line, and an error of one sentence if that fails."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest

from lowpeak.errors import ArgumentError
from lowpeak.rewards.builtin import SoftOverlong, exact_match, get_soft_overlong_punishment
from lowpeak.rewards.factory import (
    BUILTIN_REWARDS,
    REWARD_FACTORIES,
    check_rewards,
    load_object,
    load_reward,
    make_rewards,
)
from lowpeak.rewards.function import callable_name

FILE = """
from dataclasses import dataclass
import beside

@dataclass
class ScaledLength:
    factor: float = 2.0

    def __call__(self, completions, **kwargs):
        return [self.factor * beside.length(text) for text in completions]

    def halved(self, completions, **kwargs):
        return [value / 4 for value in self(completions)]

def short(completions, **kwargs):
    return [-beside.length(text) for text in completions]

scaled = ScaledLength()
number = 3
"""


@pytest.fixture
def rewards_py(tmp_path):
    (tmp_path / "beside.py").write_text("def length(text):\n    return len(text)\n")
    path = tmp_path / "my-rewards.py"
    path.write_text(FILE)
    yield path
    sys.modules.pop("beside", None)


def test_a_file_gives_its_functions_objects_and_methods_finds_its_neighbours_and_runs_once_until_it_is_edited(
    rewards_py,
):
    path = list(sys.path)
    for name, reward in (("short", -2), ("scaled", 4.0), ("scaled.halved", 1.0)):
        assert load_reward(f"{rewards_py}:{name}")(completions=["aa"]) == [reward]
    assert sys.path == path
    assert load_reward(f"{rewards_py}:scaled") is load_reward(f"{rewards_py}:scaled")
    rewards_py.write_text(FILE.replace("2.0", "5.0"))
    assert load_reward(f"{rewards_py}:scaled")(completions=["a"]) == [5.0]


@pytest.mark.parametrize("name", BUILTIN_REWARDS)
def test_every_shipped_name_is_a_reward_of_that_name(name):
    reward = make_rewards(load_reward(name))[0]
    assert reward.name == {"get_soft_overlong_punishment": "soft_overlong_punishment_reward"}.get(name, name)
    values = reward(prompts=["p"], completions=["5"], completion_ids=[[5]], answer=["5"], solution=["5"])
    assert [type(value) for value in values] == [float]


def test_factories_are_written_with_their_arguments():
    assert load_reward("soft_overlong(8, cache=4)") == SoftOverlong(8, 4)
    assert load_reward("get_soft_overlong_punishment(8, soft_punish_cache=4)") == get_soft_overlong_punishment(8, 4)
    assert load_reward("get_soft_overlong_punishment") == get_soft_overlong_punishment(1280, 256)
    assert load_reward("get_repetition_penalty_reward(ngram_size=1)")(completion_ids=[[1, 1]]) == [-0.5]
    assert load_reward("linear_length(per_token=-1)")(completion_ids=[[1, 2]]) == [2]
    reward = load_reward(r"format_reward('a\\d (x|y)', name='mine')")
    assert reward(completions=["a1 x", "a1 z"]) == [1.0, 0.0]
    assert callable_name(reward) == "mine"
    assert set(REWARD_FACTORIES) & set(BUILTIN_REWARDS) == {"get_soft_overlong_punishment"}


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        *((f"lowpeak.rewards.builtin{mark}exact_match", exact_match) for mark in ".:"),
        *((model, model) for model in ("owner/model", "./models/tiny", "/models/tiny", ".")),
    ],
)
def test_a_dotted_name_gives_a_modules_function_and_a_models_name_or_folder_comes_back_as_it_is(spec, found):
    assert load_reward(spec) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os\n\nboom = undefined\n", r"line 3: NameError: .*'undefined'"),
        ("def f(:\n", r"line 1: SyntaxError"),
        ("import nowhere_to_be_found\n", r"line 1: ModuleNotFoundError: .*'nowhere_to_be_found'"),
        ("import json\njson.loads('')\n", r"line 2: JSONDecodeError"),
        ("import sys\nsys.exit(3)\n", r"line 2: SystemExit: 3"),
    ],
)
def test_a_file_that_does_not_import_is_told_with_its_line(tmp_path, text, words):
    path = tmp_path / "broken.py"
    path.write_text(text)
    modules = set(sys.modules)
    with pytest.raises(ArgumentError, match=rf"{path}.*{words}"):
        load_reward(f"{path}:f")
    assert not [name for name in set(sys.modules) - modules if "broken" in name]


@pytest.mark.parametrize("attribute", ["missing", "scaled.missing", "", "number", "ScaledLength"])
def test_an_attribute_that_is_no_reward_is_told(rewards_py, attribute):
    with pytest.raises(ArgumentError, match=re.escape(f"'{rewards_py}:{attribute}'")):
        load_reward(f"{rewards_py}:{attribute}")


def test_a_module_that_fails_inside_is_told_apart_from_one_that_is_missing(tmp_path, monkeypatch):
    (tmp_path / "failing_rewards.py").write_text("import json\nimport gone_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ArgumentError, match=r"failing_rewards\.py, line 2: ModuleNotFoundError: .*'gone_module'"):
        load_reward("failing_rewards.f")


@pytest.mark.parametrize(
    ("load", "spec", "words"),
    [
        (load_reward, "no/such/file.py:f", r"Reward .*'no/such/file\.py'"),
        (load_reward, "some/file.py", r"'some/file\.py:object'"),
        (load_reward, "no_such_package.rewards.f", "'no_such_package'"),
        (load_reward, "lowpeak.no_such_module.f", r"'lowpeak\.no_such_module'"),
        (load_reward, "lowpeak.rewards.builtin.gone", "'gone'.*check the name"),
        (load_reward, "unlike_any", "'unlike_any'.*exact_match, numeric_match"),
        (load_reward, "exact_mach", "'exact_mach' .* did you mean 'exact_match'"),
        (load_reward, "format_rewards('a:b.c')", "'format_rewards' .* did you mean 'format_reward'"),
        (load_reward, "lowpeak.rewards.builtin.exact_mach", r"\.exact_mach' .* did you mean 'exact_match'"),
        (load_reward, f"{__file__}:FILES", "FILES' .* did you mean 'FILE'"),
        (
            load_reward,
            f"{Path(__file__).with_name('test_reward_factory.py')}:f",
            f"did you mean '{Path(__file__).name}'",
        ),
        (load_reward, "format_reward(foo)", r"'format_reward\(foo\)' .* numbers or texts in quotes; write"),
        (load_reward, "", "''"),
        (load_reward, "soft_overlong", "'soft_overlong'"),
        (load_reward, "soft_overlong(1", r"'soft_overlong\(1'"),
        (load_reward, "soft_overlong(8)", "'cache'"),
        (load_reward, "soft_overlong(len('a'), 1)", r"soft_overlong\(len"),
        (load_reward, "soft_overlong(1, 8)", "max_length 1.* 8"),
        (partial(load_object, role="Judge"), "pairs.py", r"Judge 'pairs\.py'"),
    ],
)
def test_what_cannot_be_found_or_made_is_one_sentence(load, spec, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        load(spec)
    assert "\n" not in str(caught.value)


def test_a_reward_of_another_type_is_told_with_its_type(rewards_py):
    with pytest.raises(ArgumentError, match="must be callable, but it is of type int"):
        load_reward(f"{rewards_py}:number")


def test_a_misspelt_name_in_reward_funcs_is_not_taken_for_a_model():
    with pytest.raises(ArgumentError, match=r"'accuracy_rewards' .* did you mean 'accuracy_reward'"):
        check_rewards(["accuracy_rewards"], [], "row 0")


def test_a_tokenizer_for_a_function_is_named(caplog):
    make_rewards([exact_match, len], [None, "tokenizer"])
    assert [record.args for record in caplog.records] == [("len",)]

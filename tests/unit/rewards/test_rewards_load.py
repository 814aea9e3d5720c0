"""A reward is found by the words of a command line, or it is said in one sentence why not."""

from __future__ import annotations

import sys

import pytest

from lowpeak.errors import ArgumentError
from lowpeak.rewards.answers import exact_match
from lowpeak.rewards.function import callable_name
from lowpeak.rewards.length import SoftOverlong
from lowpeak.rewards.load import FACTORIES, SHIPPED, load_judge, load_reward
from lowpeak.rewards.make import make_rewards

FILE = """
from dataclasses import dataclass
import beside

@dataclass
class Judge:
    factor: float = 2.0

    def __call__(self, completions, **kwargs):
        return [self.factor * beside.length(text) for text in completions]

    def halved(self, completions, **kwargs):
        return [value / 4 for value in self(completions)]

def short(completions, **kwargs):
    return [-beside.length(text) for text in completions]

judge = Judge()
number = 3
"""


@pytest.fixture
def rewards_py(tmp_path):
    (tmp_path / "beside.py").write_text("def length(text):\n    return len(text)\n")
    path = tmp_path / "my-rewards.py"
    path.write_text(FILE)
    yield path
    sys.modules.pop("beside", None)


def test_a_file_gives_its_functions_objects_and_methods_and_finds_its_neighbours(rewards_py):
    path = list(sys.path)
    assert load_reward(f"{rewards_py}:short")(completions=["aa"]) == [-2]
    assert load_reward(f"{rewards_py}:judge")(completions=["aa"]) == [4.0]
    assert load_reward(f"{rewards_py}:judge.halved")(completions=["aa"]) == [1.0]
    assert sys.path == path


def test_a_file_runs_once_until_it_is_edited(rewards_py):
    first = load_reward(f"{rewards_py}:judge")
    assert load_reward(f"{rewards_py}:judge") is first
    rewards_py.write_text(FILE.replace("2.0", "5.0"))
    assert load_reward(f"{rewards_py}:judge")(completions=["a"]) == [5.0]


@pytest.mark.parametrize("spec", ["lowpeak.rewards.answers.exact_match", "lowpeak.rewards.answers:exact_match"])
def test_a_dotted_name_gives_a_modules_function(spec):
    assert load_reward(spec) is exact_match


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_name_is_a_reward_of_that_name(name):
    reward = make_rewards(load_reward(name))[0]
    assert reward.name == name
    values = reward(prompts=["p"], completions=["5"], completion_ids=[[5]], answer=["5"])
    assert [type(value) for value in values] == [float]


def test_factories_are_written_with_their_arguments():
    assert load_reward("soft_overlong(8, cache=4)") == SoftOverlong(8, 4)
    assert load_reward("linear_length(per_token=-1)")(completion_ids=[[1, 2]]) == [2]
    reward = load_reward(r"format_reward('a\\d (x|y)', name='mine')")
    assert reward(completions=["a1 x", "a1 z"]) == [1.0, 0.0]
    assert callable_name(reward) == "mine"
    assert set(FACTORIES).isdisjoint(SHIPPED)


@pytest.mark.parametrize("spec", ["owner/judge", "./judges/tiny", "/judges/tiny"])
def test_a_models_name_comes_back_as_it_is(spec):
    assert load_reward(spec) == spec


def test_an_existing_folder_is_a_models(tmp_path):
    assert load_reward(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os\n\nboom = undefined\n", r"does not import: line 3: NameError: name 'undefined' is not defined"),
        ("def f(:\n", r"does not import: line 1: SyntaxError"),
        ("import nowhere_to_be_found\n", r"line 1: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("import json\njson.loads('')\n", r"line 2: JSONDecodeError"),
        ("import sys\nsys.exit(3)\n", r"line 2: SystemExit: 3"),
    ],
)
def test_a_file_that_does_not_import_is_told_with_its_line(tmp_path, text, words):
    path = tmp_path / "broken.py"
    path.write_text(text)
    modules = set(sys.modules)
    with pytest.raises(ArgumentError, match=words) as caught:
        load_reward(f"{path}:f")
    assert str(path) in str(caught.value)
    assert not [name for name in set(sys.modules) - modules if "broken" in name]


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("missing", "there is no 'missing' in "),
        ("judge.missing", r"there is no 'judge\.missing' in "),
        ("", "there is no '' in "),
        ("number", "cannot be called as a reward: it is a int"),
        ("Judge", "it is a class, name an object or a function"),
    ],
)
def test_an_attribute_that_is_no_reward_is_told(rewards_py, attribute, words):
    with pytest.raises(ArgumentError, match=words):
        load_reward(f"{rewards_py}:{attribute}")


def test_a_module_that_fails_inside_is_told_apart_from_one_that_is_missing(tmp_path):
    (tmp_path / "failing_rewards.py").write_text("import json\nimport gone_module\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(ArgumentError, match=r"failing_rewards\.py, line 2: ModuleNotFoundError: .*'gone_module'"):
            load_reward("failing_rewards.f")
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no/such/file.py:f", r"Reward file 'no/such/file\.py' does not exist"),
        ("some/file.py", r"is a file: name its function, as in 'some/file\.py:function'"),
        ("no_such_package.rewards.f", "there is no module 'no_such_package'"),
        ("lowpeak.no_such_module.f", r"there is no module 'lowpeak\.no_such_module'"),
        ("lowpeak.rewards.answers.gone", "there is no 'gone' in "),
        ("exact_mach", "no shipped reward 'exact_mach': .*exact_match, numeric_match"),
        ("", "There is no shipped reward ''"),
        ("soft_overlong", "cannot be made: it has no arguments; 'soft_overlong' takes literal arguments"),
        ("soft_overlong(1", "cannot be made"),
        ("soft_overlong(8)", "missing 1 required positional argument: 'cache'"),
        ("soft_overlong(len('a'), 1)", "cannot be made"),
        ("soft_overlong(1, 8)", "cache must be from 0 to max_length 1, not 8"),
    ],
)
def test_what_cannot_be_found_or_made_is_one_sentence(spec, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        load_reward(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no/such/file.py:one", r"Judge file 'no/such/file\.py' does not exist"),
        ("no_such_package.one", "Judge 'no_such_package.one' does not import: there is no module 'no_such_package'"),
        ("lowpeak.rewards.judge.gone", r"Judge 'lowpeak\.rewards\.judge\.gone' does not exist: there is no 'gone' in "),
        ("pairs.py", r"Judge 'pairs\.py' is nowhere: write path/to/file\.py:object"),
    ],
)
def test_a_judge_that_cannot_be_found_is_told_as_a_judge(spec, words):
    with pytest.raises(ArgumentError, match=words):
        load_judge(spec)

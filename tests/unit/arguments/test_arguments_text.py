"""Reading YAML and checking argument names."""

from __future__ import annotations

import pytest

from lowpeak.arguments.names import check_names
from lowpeak.arguments.text import load_yaml, show_bytes, show_seconds
from lowpeak.errors import ArgumentError


def write(folder, text):
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_settings_come_back_with_their_types(tmp_path):
    text = "model: tiny\nbeta: .5\nbf16: true\nseed: 3\nkwargs: {a: [1, 2]}\n"
    expected = {"model": "tiny", "beta": 0.5, "bf16": True, "seed": 3, "kwargs": {"a": [1, 2]}}
    assert load_yaml(write(tmp_path, text)) == expected
    assert load_yaml(write(tmp_path, "# nothing yet\n")) == {}


NUMBERS = ("1e-6", "5E-7", "-2e3", "1.e5", "+.5e-2")
TEXTS = ("1e", "e5", "1e-6b", "2026-01-02e", "'1e-6'")  # that only look like an exponent


def test_exponents_without_a_dot_are_numbers(tmp_path):
    found = load_yaml(write(tmp_path, "".join(f"x{n}: {text}\n" for n, text in enumerate((*NUMBERS, *TEXTS)))))
    assert list(found.values()) == [*map(float, NUMBERS), *(text.strip("'") for text in TEXTS)]


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"a: \xff\xfe\x00", ""),
        (b"- a\n- b\n", "list"),
        (b"just text\n", "str"),
        (b"3\n", "int"),
        (b"seed: 1\n1: 2\n", " 1,"),
        (b"on: 2\n", " True,"),
        (b"a: 1\nb: 2: 3\n", " 2,"),
        (b"a: 2026-13-01\n", "month"),
        (b"beta: 0.1\nseed: 1\nbeta: 0.2\n", " 3, .*'beta'"),
        (b"a: !!python/object/apply:os.getcwd []\n", ""),  # no code runs
        (b"a: " + b"[" * 3000 + b"]" * 3000, ""),
    ],
)
def test_a_file_that_is_not_settings_is_an_error_with_its_name_and_line(tmp_path, content, pattern):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ArgumentError, match=rf"run\.yaml.*{pattern}"):
        load_yaml(tmp_path / "run.yaml")


@pytest.mark.parametrize("name", ["none.yaml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(ArgumentError, match=str(tmp_path / name)):
        load_yaml(tmp_path / name)


def test_each_unknown_name_is_named_with_its_remedy_or_the_closest_known_one():
    known, rejected = {"beta", "num_generations", "label_names"}, {"max_prompt_length": "set overlong_prompts"}
    check_names(known, known, rejected)
    names = ["num_generation", "beta", "zzz", "model_name", "max_prompt_length"]
    pattern = r"'num_generation'.*'num_generations'.*'zzz'.*'model_name'.*'max_pro.*overlong_prompts"
    with pytest.raises(ArgumentError, match=pattern) as refused:
        check_names(names, known, rejected)
    assert "label_names" not in str(refused.value)  # far from `model_name`


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 KiB"), (512, "0.5 KiB"), (5 << 20, "5 MiB"), ((1 << 30) - 1, "1024 MiB"), (80 << 30, "80 GiB"),
     (1_288_490_189, "1.2 GiB"), (3 << 40, "3072 GiB")],
)  # fmt: skip
def test_bytes_are_shown_in_the_largest_unit_that_they_reach(number, shown):
    assert show_bytes(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0453, "0.045 s"), (9.5, "9.5 s"), (61, "61 s"), (725, "12 min"), (14_000, "3.9 h")]
)
def test_seconds_are_shown_in_a_unit_that_people_use(seconds, shown):
    assert show_seconds(seconds) == shown

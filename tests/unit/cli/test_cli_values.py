from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import pytest

from lowpeak.cli.values import choices, convert, list_item


class Speed(Enum):
    SLOW = "slow"
    NO = "no"


@pytest.mark.parametrize(
    ("hint", "given", "value"),
    [
        (int, "3", 3),
        (int, "1e3", 1000),
        (int, 3.0, 3),
        (int, str(2**53 + 1), 2**53 + 1),
        (float, "1e-6", 1e-6),
        (float, 2, 2.0),
        (bool, "true", True),
        (bool, "off", False),
        (bool | None, "none", None),
        (str, "none", "none"),
        (str | None, "null", "null"),
        (str | None, None, None),
        (float | None, "none", None),
        (int | str, "8", 8),
        (int | str, "eight", "eight"),
        (str | bool, "group", "group"),
        (str | bool, True, True),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], "2", 2),
        (Speed, "slow", "slow"),
        (Speed | str, False, "no"),
        (list[float], ["1", 2], [1.0, 2.0]),
        (list[float] | None, "0.5", [0.5]),
        (tuple[float, float] | None, [0, 1], [0.0, 1.0]),
        (str | list[str] | None, "one", "one"),
        (dict, '{"a": 1}', {"a": 1}),
        (dict | str | None, {"a": 1}, {"a": 1}),
        (dict | str | None, "file.json", "file.json"),
        (Any, 5, 5),
    ],
)
def test_text_and_yaml_become_what_the_hint_asks_for(hint, given, value):
    found = convert(hint, given)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("hint", "given", "expected"),
    [
        (int, "3.5", "a whole number"),
        (int, "many", "a whole number"),
        (int, True, "a whole number"),
        (float, "fast", "a number"),
        (bool, "perhaps", "true or false"),
        (Literal["a", "b"], "c", "one of a, b"),
        (Speed | str, "fast", "one of slow, no"),
        (list[int] | None, ["x"], "a whole number"),
        (int, [1], "not a list"),
        (float | None, {}, "a number"),
        (int, None, "needs a value"),
        (dict, "[1]", "a JSON object"),
        (dict | str | None, "[1]", "a JSON object"),
        (dict | str | None, "{bad", "a JSON object .*property name"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_expected(hint, given, expected):
    with pytest.raises(ValueError, match=expected):
        convert(hint, given)


def test_the_choices_of_a_union_are_those_of_its_members():
    assert choices(Literal["a"] | Speed | None) == ("a", "slow", "no")
    assert choices(int | None) == ()


def test_a_list_is_found_inside_a_union():
    assert list_item(str | list[int] | None) is int
    assert list_item(list) is str
    assert list_item(str | None) is None

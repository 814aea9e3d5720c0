"""Text or YAML to the value that a dataclass field's type hint asks for.

One function serves both, so that `learning_rate: 1e-6` in a file (which YAML 1.1 reads as a string) and
`--learning_rate 1e-6` mean the same number.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; of any other hint, itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def list_item(hint: Any) -> Any | None:
    """The hint of a list's items, or None when no alternative of the hint is a list."""
    for member in members(hint):
        if (get_origin(member) or member) in (list, tuple):
            return (get_args(member) or (str,))[0]
    return None


def choices(hint: Any) -> tuple[Any, ...]:
    """The only values allowed, where the hint lists them (a Literal or an Enum)."""
    found: list[Any] = []
    for member in members(hint):
        if get_origin(member) is Literal:
            found.extend(get_args(member))
        elif isinstance(member, type) and issubclass(member, Enum):
            found.extend(item.value for item in member)
    return tuple(found)


def convert(hint: Any, value: Any) -> Any:
    """The value as the hint wants it: each alternative of a union is tried, a plain string late, a list of one last.

    Raises ValueError with what was expected.
    """
    alternatives = members(hint)
    if _says_none(alternatives, value):
        if type(None) in alternatives or hint is Any:
            return None
        raise ValueError("needs a value")
    if isinstance(value, list | tuple):
        return _convert_list(hint, value)
    if dict in (get_origin(each) or each for each in alternatives):
        _check_json(value)
    return _first_that_reads(hint, value)


def _says_none(alternatives: tuple[Any, ...], value: Any) -> bool:
    return value is None or (str not in alternatives and str(value).lower() in ("none", "null"))


def _first_that_reads(hint: Any, value: Any) -> Any:
    for alternative in sorted(members(hint), key=lambda each: 2 if list_item(each) else each is str):
        if alternative is str and choices(hint):
            continue  # `SomeEnum | str` is how transformers says SomeEnum
        try:
            return _read(alternative, value)
        except (KeyError, TypeError, ValueError):
            continue
    raise ValueError(f"expects {expected(hint)}, not {str(value)!r}")


def _check_json(value: Any) -> None:
    """Text that begins as JSON must be a JSON object, also where other text could be a file's name."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            _read_dict(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"expects a JSON object ({error})") from None


def _convert_list(hint: Any, values: list[Any] | tuple[Any, ...]) -> list[Any]:
    item = list_item(hint)
    if item is None:
        raise ValueError(f"expects {expected(hint)}, not a list")
    return [convert(item, value) for value in values]


def _read(hint: Any, value: Any) -> Any:
    if hint is Any:
        return value
    allowed = choices(hint)
    if allowed:
        text = "no" if value is False else str(value)  # YAML 1.1 reads a bare `no` as false
        return {str(choice): choice for choice in allowed}[text]
    if list_item(hint) is not None:
        return [convert(list_item(hint), value)]
    return _READERS[get_origin(hint) or hint](value)


def _read_bool(value: Any) -> bool:
    return _SWITCH[str(value).lower()]


def _read_dict(value: Any) -> dict[str, Any]:
    parsed = value if isinstance(value, dict) else json.loads(value)
    if not isinstance(parsed, dict):
        raise TypeError("not an object")
    return parsed


def _read_int(value: Any) -> int:
    number = float(value) if isinstance(value, str) else value
    if isinstance(value, bool) or number != int(number):
        raise TypeError("not whole")
    return int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)


def _read_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError("not a number")
    return float(value)


def _read_str(value: Any) -> str:
    if isinstance(value, dict):
        raise TypeError("not a string")
    return str(value)


_READERS: dict[Any, Callable[[Any], Any]] = {
    bool: _read_bool,
    dict: _read_dict,
    int: _read_int,
    float: _read_float,
    str: _read_str,
}

_WORDS = {bool: "true or false", dict: "a JSON object", int: "a whole number", float: "a number", str: "a string"}


def expected(hint: Any) -> str:
    """What the hint asks for, in words."""
    allowed = choices(hint)
    if allowed:
        return "one of " + ", ".join(str(choice) for choice in allowed)
    words = [_WORDS[kind] for kind in (get_origin(each) or each for each in members(hint)) if kind in _WORDS]
    item = list_item(hint)
    if item is not None:
        words.append(f"a list, each {expected(item)}")
    return " or ".join(words) or "another value"

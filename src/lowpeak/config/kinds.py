"""Numbers that are numbers: `"4"` or 4.5 where a whole number belongs would fail far away, or be taken for something else."""

from __future__ import annotations

import types
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin, get_type_hints

from lowpeak.errors import ArgumentError

_WORDS: dict[Any, str] = {bool: "True or False", int: "a whole number", float: "a number", type(None): "None"}


def check_kinds(args: Any) -> None:
    """ArgumentError for the first field that may hold numbers, booleans or None only and holds something else."""
    hints = get_type_hints(type(args))
    for field in fields(args):
        hint, value = hints[field.name], getattr(args, field.name)
        allowed = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if value is field.default or not set(allowed) <= _WORDS.keys() or _fits(value, allowed):
            continue
        expected = " or ".join(words for kind, words in _WORDS.items() if kind in allowed)
        raise ArgumentError(f"{field.name}={value!r} must be {expected}, not a {type(value).__name__}.")


def _fits(value: Any, allowed: tuple[Any, ...]) -> bool:
    if value is None:
        return type(None) in allowed
    if isinstance(value, bool):
        return bool({bool, int, float} & set(allowed))
    if isinstance(value, Integral):  # 0 is not False where None, True and False are three things
        return bool({int, float} & set(allowed))
    return isinstance(value, Real) and float in allowed

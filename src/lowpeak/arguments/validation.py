"""Checks of a run's arguments against their declarations: types, allowed values, and arguments without effect."""

from __future__ import annotations

import copy
import logging
import math
import types
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin

from lowpeak.arguments.declare import (
    Check,
    EffectCondition,
    RunFacts,
    declaration,
    default_value,
    shown_name,
    value_types,
)
from lowpeak.arguments.names import TRL_DEFAULTS
from lowpeak.arguments.text import show
from lowpeak.errors import ArgumentError

logger = logging.getLogger(__name__)

_TYPE_NAMES: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "None",
}


def check_values(args: Any) -> None:
    """Raise ArgumentError for the first argument of a wrong type or value."""
    check_types(args)
    for field in fields(args):
        check_range(args, field.name)
    check_finite(args, [field.name for field in fields(args)])
    for cadence in ("logging", "eval", "save"):
        steps = getattr(args, f"{cadence}_steps")
        if getattr(args, f"{cadence}_strategy") == "steps" and not steps > 0:
            raise ArgumentError(f"{cadence}_steps={steps!r} must be above 0; {cadence}_strategy='no' turns it off.")


def check_types(args: Any) -> None:
    """Raise ArgumentError for the first argument that is not of its type; see `check_type`."""
    for field in fields(args):
        check_type(args, field.name)


def check_type(args: Any, name: str) -> None:
    """Raise ArgumentError for an argument that must be a number, a boolean, a string or None and is not.

    `"4"` or 4.5 for an integer would fail far from here, or be misread.
    """
    field, hint, value = args.__dataclass_fields__[name], _types_of(type(args))[name], getattr(args, name)
    allowed = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    # transformers makes enumerations of some of its strings.
    known = _TYPE_NAMES.keys() if declaration(field).group else _TYPE_NAMES.keys() - {str}
    if value is field.default or not set(allowed) <= known or _has_type(value, allowed):
        return
    expected = " or ".join(words for kind, words in _TYPE_NAMES.items() if kind in allowed)
    raise ArgumentError(
        f"{show(shown_name(args, name), value)} must be {expected}, got the type {type(value).__name__}."
    )


_types_of: Callable[[Any], dict[str, Any]] = cache(value_types)


def _has_type(value: Any, allowed: tuple[Any, ...]) -> bool:
    if value is None:
        return type(None) in allowed
    if isinstance(value, str):
        return str in allowed
    if isinstance(value, bool):
        return bool in allowed
    # 0 is not accepted for False: some arguments distinguish None, True and False.
    if isinstance(value, Integral):
        return bool({int, float} & set(allowed))
    return isinstance(value, Real) and float in allowed


def check_range(args: Any, name: str) -> None:
    """Raise ArgumentError for an argument that fails its declared check."""
    field = args.__dataclass_fields__[name]
    check: Check | None = declaration(field).check or getattr(args, "inherited_checks", {}).get(name)
    if check is not None and not check.accepts(getattr(args, name)):
        raise ArgumentError(f"{show(shown_name(args, name), getattr(args, name))} {check.requirement}.")


def check_finite(args: Any, names: Iterable[str]) -> None:
    """Raise ArgumentError for the first of these arguments that is NaN or infinite."""
    for name in names:
        value = getattr(args, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ArgumentError(f"{shown_name(args, name)}={value} must be a finite number.")


def is_set(args: Any, name: str) -> bool:
    """Return whether an argument differs from its class's default and from TRL's."""
    # transformers changes some of its own arguments itself: of these, only those that the user set count.
    ours = declaration(args.__dataclass_fields__[name]).group
    if not ours and name not in getattr(args, "given", (name,)):
        return False
    default, value = default_value(args, name), getattr(args, name)
    return bool(value != default and value != TRL_DEFAULTS.get(name, default))


def _find_idle(args: Any, facts: RunFacts) -> Iterator[tuple[str, EffectCondition]]:
    """Yield each argument that is set and has no effect, with the first of its conditions that fails."""
    never_act: Mapping[str, EffectCondition] = ChainMap(
        *(vars(owner).get("never_act", {}) for owner in type(args).__mro__)
    )
    for field in fields(args):
        declared = declaration(field).acts_if
        names = (field.name, *(each.switch for each in declared))
        conditions = [*(never_act[name] for name in names if name in never_act), *declared]
        failed = next((each for each in conditions if not each.holds(args, facts)), None)
        if failed is not None and is_set(args, field.name):
            yield field.name, failed


def idle_arguments(args: Any, facts: RunFacts) -> dict[str, str]:
    """Return each argument that is set and has no effect, as shown to the user, with the reason and remedy."""
    declared = {
        show(shown_name(args, name), getattr(args, name)): when.reason for name, when in _find_idle(args, facts)
    }
    return {**declared, **facts.idle}


def reset_idle_arguments(args: Any, facts: RunFacts) -> Any:
    """Return a copy of the arguments in which those without effect have their defaults.

    ArgumentError for an argument without effect whose condition `raises`. The others are reported together in one warning.
    """
    changed = copy.copy(args)
    for name, when in _find_idle(args, facts):
        if when.raises:
            raise ArgumentError(f"{show(shown_name(args, name), getattr(args, name))} cannot be used: {when.reason}.")
        if not when.keeps_value:
            setattr(changed, name, default_value(args, name))
    return changed


class EffectReport:
    """The arguments without effect, with reasons: collected while a run is built, then reported together.

        effects = EffectReport(args)
        effects.add_declared(facts)                                      # what the arguments' declarations say
        effects.add("state_bits=8", "no trained matrix is large enough")
        effects.report()

    `report` logs one warning on rank 0; ArgumentError with `strict_arguments`. An argument that is added later is reported at
    once, and each only once. `where` follows "have no effect" in the message.
    """

    def __init__(self, args: Any, where: str = "in this run") -> None:
        self._args, self._where = args, where
        self._reasons: dict[str, str] = {}
        self._is_reported = False

    def add(self, argument: str, reason: str) -> None:
        """Add an argument, as shown to the user."""
        if argument in self._reasons:
            return
        if self._is_reported:
            self._warn({argument: reason})
        self._reasons[argument] = reason

    def add_declared(self, facts: RunFacts) -> None:
        """Add the arguments whose declared conditions do not hold."""
        for argument, reason in idle_arguments(self._args, facts).items():
            self.add(argument, reason)

    def report(self) -> None:
        """Name all arguments that were added, in one warning or error."""
        self._is_reported = True
        if self._reasons:
            self._warn(self._reasons)

    def _warn(self, reasons: Mapping[str, str]) -> None:
        count = "1 argument has" if len(reasons) == 1 else f"{len(reasons)} arguments have"
        listed = "; ".join(f"{argument} ({reason})" for argument, reason in reasons.items())
        message = f"{count} no effect {self._where}: {listed}; strict_arguments=True makes this an error."
        if self._args.strict_arguments:
            raise ArgumentError(message)
        if self._args.process_index == 0:
            logger.warning("%s", message)

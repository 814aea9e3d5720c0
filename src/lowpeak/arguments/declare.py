"""How an argument is declared, once: its default, its group and help, the values it may have, and when it acts.

A family of arguments is a dataclass of such fields; beside it stand the frozen record that code reads and the function that
makes one of the other. `check.py` holds a run to what is declared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from numbers import Real
from typing import Any, TypeVar, get_args

from lowpeak.errors import ArgumentError

Record = TypeVar("Record")


@dataclass(frozen=True)
class Check:
    """What values an argument may have, whatever the others say: a predicate, and the end of a sentence that begins with it."""

    fits: Callable[[Any], bool]
    words: str


@dataclass(frozen=True)
class Facts:
    """What a run knows beside its arguments; None is not known yet, and then what depends on it counts as acting.

    A rollout serves `num_steps` optimizer steps. `own_memory`: the device's memory is not the host's. `sharded`: parameters are
    cut over ranks. `frozen`: the run has a model that is never trained. `idle` are arguments found idle by those who know, as
    they are shown, each with the reason.
    """

    num_rewards: int | None = None
    num_steps: int | None = None
    own_memory: bool | None = None
    sharded: bool | None = None
    in_fp32: bool | None = None
    states_on_host: bool | None = None
    frozen: bool | None = None
    idle: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ActsWhen:
    """A condition of an argument's effect, and why there is none where it does not hold, with the remedy.

    Without effect an argument is named in a warning; with `raises` it is an error, since going on would mislead. `switch` is
    the argument that turns this one on: where it never acts, this one does not either.
    """

    holds: Callable[[Any, Facts], bool]
    because: str
    raises: bool = False
    switch: str = ""


def never(because: str, raises: bool = False) -> ActsWhen:
    """Return the condition of an argument that does not act at all."""
    return ActsWhen(lambda args, facts: False, because, raises)


def if_on(switch: str) -> ActsWhen:
    """Return the condition of an argument that acts where another one, a switch, is on."""
    off = f"{switch} is off; set {switch}=True or remove it"
    return ActsWhen(lambda args, facts: getattr(args, switch), off, switch=switch)


def argument(
    default: Any,
    text: str,
    check: Check | None = None,
    acts: ActsWhen | tuple[ActsWhen, ...] = (),
    means: str | None = None,
    *,
    group: str = "algorithm",
) -> Any:
    """Return a dataclass field: its help and the group it is listed under, its range, and the conditions under which it acts.

    `means` is the argument whose other name this is.
    """
    conditions = acts if isinstance(acts, tuple) else (acts,)
    metadata = {"group": group, "help": text, "check": check, "acts": conditions, "means": means}
    return field(default=default, metadata=metadata)


in_model = partial(argument, group="model")
in_data = partial(argument, group="data")
in_rewards = partial(argument, group="rewards")
in_generation = partial(argument, group="generation")
in_vllm = partial(argument, group="vllm")
in_memory = partial(argument, group="memory")
in_devices = partial(argument, group="several devices")
in_evaluation = partial(argument, group="evaluation")
in_logging = partial(argument, group="logging")
in_training = partial(argument, group="training")


def redeclared(family: Any, name: str, default: Any = MISSING, also: ActsWhen | None = None, **changes: Any) -> Any:
    """Return the field of another family with another default, one more condition (the first to be asked), or other metadata."""
    was: Field[Any] = family.__dataclass_fields__[name]
    metadata = {**was.metadata, **changes}
    if also is not None:
        metadata["acts"] = (also, *metadata["acts"])
    return field(default=was.default if default is MISSING else default, metadata=metadata)


def fill(record: Callable[..., Record], args: Any, prefix: str = "", **computed: Any) -> Record:
    """Make a settings record: what is not `computed` is the argument of the same name behind `prefix`, or the record's default."""
    names = {f.name for f in fields(record) if hasattr(args, prefix + f.name)} - computed.keys()  # type: ignore[arg-type]
    return record(**{name: getattr(args, prefix + name) for name in names}, **computed)


def default_of(args: Any, name: str) -> Any:
    """Return the default that an argument's own class declares."""
    found: Field[Any] = args.__dataclass_fields__[name]
    return found.default if found.default_factory is MISSING else found.default_factory()


def said_as(args: Any, name: str) -> str:
    """Return the name by which the user said an argument: its own, or another library's for the same."""
    return str(getattr(args, "said_as", {}).get(name, name))


def require(condition: bool, message: str) -> None:
    """Raise ArgumentError with `message` unless the condition holds."""
    if not condition:
        raise ArgumentError(message)


# Ranges that several arguments have.


def are_finite(numbers: Any) -> bool:
    """Return whether something is a list or a tuple of finite numbers."""
    return isinstance(numbers, list | tuple) and all(
        isinstance(each, Real) and not isinstance(each, bool) and math.isfinite(each) for each in numbers
    )


def one_of(literal: Any, *unsaid: Any) -> Check:
    """Return the check for values of a Literal; `unsaid` ones are taken too, for scripts that were written for TRL."""
    values = get_args(literal)
    return Check(lambda x: x in (*values, *unsaid), f"must be one of {', '.join(map(repr, values))}")


def at_least(least: float, unit: str = "") -> Check:
    """Return the check for None and numbers from `least` on."""
    end = f" {unit}" if unit else ""
    return Check(lambda x: x is None or x >= least, f"must be at least {least}{end}")


def above_zero(what: str = "") -> Check:
    """Return the check for None and numbers above 0; `what` they are of."""
    return Check(lambda x: x is None or x > 0, f"must be {what} above 0" if what else "must be above 0")


def within(low: float, high: float) -> Check:
    """Return the check for None and numbers from `low` to `high`."""
    return Check(lambda x: x is None or low <= x <= high, f"must be in [{low}, {high}]")


MAPPING = Check(
    lambda x: x is None or isinstance(x, Mapping), "must be a mapping, or a JSON object such as '{\"name\": value}'"
)
SHARE = Check(lambda x: 0 < x <= 1, "must be in (0, 1]")
NOT_NEGATIVE = Check(lambda x: x is None or x >= 0, "must be 0 or more")
FINITE = Check(lambda x: x is None or 0 <= x < float("inf"), "must be a finite number of 0 or more")

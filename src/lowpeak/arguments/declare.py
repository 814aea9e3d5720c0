"""Declarations of arguments: default, group, help text, allowed values, and when the argument has an effect.

A family of arguments is a dataclass of such fields, in one module with the frozen settings that code reads and the function
that resolves one to the other. `validation.py` checks a run's arguments against their declarations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from numbers import Real
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from lowpeak.errors import ArgumentError

SettingsT = TypeVar("SettingsT")


@dataclass(frozen=True)
class Check:
    """The values that an argument may have: a predicate, and the end of the error's sentence ("must be ...")."""

    accepts: Callable[[Any], bool]
    requirement: str


@dataclass(frozen=True)
class Hardware:
    """The torch device, processes and replicas that settings are resolved for.

    `has_replicas`: several ranks have the same parameters.
    """

    device: str
    num_processes: int
    has_replicas: bool


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that decide which arguments have an effect; None if not known yet, which counts as an effect.

    A rollout serves `num_steps` optimizer steps. `has_device_memory`: the device does not use host memory;
    `is_cuda`: it is a GPU of CUDA or ROCm. `num_processes` are the run's.
    `sharded`: parameters are sharded over ranks. `replicated`: several ranks have the same parameters, as under DDP.
    `casts_weights`: autocast casts fp32 weights.
    `frozen`: the run has a model that is never trained. `passed_optimizer`: the user passed an optimizer to the trainer
    ("instance"), or its class ("class"); `passed_schedule`: a schedule. `has_tools`: the policy talks to tools or
    environments. `has_programs`: an environment drives its conversations. `has_turns`: a completion may have several turns.
    `has_adapter`: an adapter is trained. `idle` maps other arguments without effect, as shown to the user, to the reason.
    """

    num_processes: int | None = None
    num_rewards: int | None = None
    num_steps: int | None = None
    has_device_memory: bool | None = None
    is_cuda: bool | None = None
    sharded: bool | None = None
    casts_weights: bool | None = None
    replicated: bool | None = None
    in_fp32: bool | None = None
    states_on_host: bool | None = None
    frozen: bool | None = None
    passed_optimizer: str | None = None
    passed_schedule: bool | None = None
    has_tools: bool | None = None
    has_programs: bool | None = None
    has_turns: bool | None = None
    has_adapter: bool | None = None
    idle: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EffectCondition:
    """A condition for an argument to have an effect, with the reason and remedy shown if it does not hold.

    An argument without effect is named in a warning; with `raises` it is an error, if continuing would mislead. `switch` is the
    argument that turns this one on: if `switch` never has an effect, this argument has none either. With `keeps_value` its
    value is not reset, because the run does not read it, but callbacks and methods that a user calls may.
    """

    holds: Callable[[Any, RunFacts], bool]
    reason: str
    raises: bool = False
    switch: str = ""
    keeps_value: bool = False


def _never_holds(args: Any, facts: RunFacts) -> bool:
    return False


def never(reason: str, raises: bool = False) -> EffectCondition:
    """Return the condition of an argument that never has an effect."""
    return EffectCondition(_never_holds, reason, raises)


def is_inert(config_class: type, declared: Field[Any]) -> bool:
    """Return whether an argument of a config never has an effect."""
    inherited = (vars(owner).get("never_act", {}).get(declared.name) for owner in config_class.__mro__)
    return any(each.holds is _never_holds for each in (*filter(None, inherited), *declaration(declared).acts_if))


def if_on(switch: str) -> EffectCondition:
    """Return the condition of an argument that acts only if the argument `switch` is True."""
    off = f"{switch} is off; set {switch}=True or remove it"
    return EffectCondition(lambda args, facts: getattr(args, switch), off, switch=switch)


class Declaration(str):
    """Help text, group in `--help`, check, effect conditions and alias of an argument.

    `alias_of` is the name of another argument, if this one is an alias of it.
    """

    # A field's metadata contains nothing but the help text, because HfArgumentParser passes all of it to argparse.
    group: str = ""
    check: Check | None = None
    acts_if: tuple[EffectCondition, ...] = ()
    alias_of: str | None = None


def _metadata(text: str, **parts: Any) -> dict[str, Declaration]:
    declared = Declaration(text)
    vars(declared).update(parts)
    return {"help": declared}


def declaration(declared: Field[Any]) -> Declaration:
    """Return the declaration of a field; an empty one for transformers' fields."""
    text = declared.metadata.get("help", "")
    return text if isinstance(text, Declaration) else Declaration(text)


def argument(
    default: Any,
    text: str,
    check: Check | None = None,
    acts_if: EffectCondition | tuple[EffectCondition, ...] = (),
    alias_of: str | None = None,
    *,
    group: str = "algorithm",
) -> Any:
    """Return a dataclass field with its declaration; a default that is a list is copied for each config."""
    conditions = acts_if if isinstance(acts_if, tuple) else (acts_if,)
    start: dict[str, Any] = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**start, metadata=_metadata(text, group=group, check=check, acts_if=conditions, alias_of=alias_of))


model_argument = partial(argument, group="model")
data_argument = partial(argument, group="data")
reward_argument = partial(argument, group="rewards")
generation_argument = partial(argument, group="generation")
vllm_argument = partial(argument, group="vllm")
memory_argument = partial(argument, group="memory")
device_argument = partial(argument, group="several devices")
evaluation_argument = partial(argument, group="evaluation")
logging_argument = partial(argument, group="logging")
training_argument = partial(argument, group="training")


def redeclared(
    family: Any, name: str, default: Any = MISSING, also: EffectCondition | None = None, **changes: Any
) -> Any:
    """Return a field of another family with a new default, a new first condition (`also`), or another declaration."""
    was: Field[Any] = family.__dataclass_fields__[name]
    before = declaration(was)
    text, parts = changes.pop("help", before), {**vars(before), **changes}
    if also is not None:
        parts["acts_if"] = (also, *parts["acts_if"])
    return field(default=was.default if default is MISSING else default, metadata=_metadata(text, **parts))


def value_types(kind: type) -> dict[str, Any]:
    """Return the types of the arguments of a dataclass; `Annotated[str, bool]` means a string or a boolean.

    HfArgumentParser accepts no such union, and parses the first type.
    """
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: Union[hint.__origin__, *hint.__metadata__] if get_origin(hint) is Annotated else hint
        for name, hint in hints.items()
    }


def make_settings(settings_class: Callable[..., SettingsT], args: Any, prefix: str = "", **computed: Any) -> SettingsT:
    """Make settings from `computed` values and from arguments named `prefix` + field; others keep their defaults."""
    names = {f.name for f in fields(settings_class) if hasattr(args, prefix + f.name)} - computed.keys()  # type: ignore[arg-type]
    return settings_class(**{name: getattr(args, prefix + name) for name in names}, **computed)


def default_value(args: Any, name: str) -> Any:
    """Return the default of an argument in its class."""
    declared: Field[Any] = args.__dataclass_fields__[name]
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


def own_arguments(args: Any) -> frozenset[str]:
    """Return the names of the arguments that lowpeak declares, of a config or its class."""
    return frozenset(each.name for each in fields(args) if declaration(each).group)


def shown_name(args: Any, name: str) -> str:
    """Return the name that the user set an argument by: its name, or an alias."""
    return str(getattr(args, "alias_of", {}).get(name, name))


def require(condition: bool, message: str) -> None:
    """Raise ArgumentError with `message` unless the condition holds."""
    if not condition:
        raise ArgumentError(message)


# Checks that several arguments share.


def are_finite(numbers: Any) -> bool:
    """Return whether a value is a list or a tuple of finite numbers."""
    return isinstance(numbers, list | tuple) and all(
        isinstance(each, Real) and not isinstance(each, bool) and math.isfinite(each) for each in numbers
    )


def one_of(literal: Any, *undocumented: Any) -> Check:
    """Return the check for values of a Literal; `undocumented` ones are also accepted, for scripts written for TRL."""
    values = get_args(literal)
    return Check(lambda x: x in (*values, *undocumented), f"must be one of {', '.join(map(repr, values))}")


def at_least(least: float, unit: str = "") -> Check:
    """Return the check for None and numbers of at least `least`."""
    end = f" {unit}" if unit else ""
    return Check(lambda x: x is None or x >= least, f"must be at least {least}{end}")


def above_zero(what: str = "") -> Check:
    """Return the check for None and numbers above 0; `what` names them, such as "a number of seconds"."""
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

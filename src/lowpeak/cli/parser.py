"""The parser of command lines and YAML files: a file sets defaults, the command line overrides them.

Every field of the given dataclasses is an argument, parsed by transformers' HfArgumentParser. Only arguments that the user set
are returned, so that defaults stay in the configs. An unknown name is an error that suggests the closest known one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from typing import Any, Union, cast, get_args, get_origin

from transformers.hf_argparser import HfArgumentParser, string_to_bool

from lowpeak.arguments import (
    MAPPING,
    REJECTED,
    check_names,
    declaration,
    drop_trl_defaults,
    is_inert,
    is_secret,
    load_yaml,
    read_object,
    value_types,
)
from lowpeak.cli.arguments import ErrorParser
from lowpeak.errors import ArgumentError

# Names of TRL's command line, and those of the same arguments here.
ALIASES = {
    "model_name_or_path": "model",
    "sft_model_path": "model",
    "reward_model_path": "reward_model_name_or_path",
    "dataset_name": "dataset",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "eval_split",
    "dataset_streaming": "streaming",
    "reward_funcs": "reward",
}

# The groups of `--help` in order. A declared group may have another title; transformers' arguments are grouped by prefix.
HELP_GROUPS = ("model", "data", "rewards", "generation", "rollouts by vLLM", "algorithm", "memory", "several devices", "evaluation",
          "logging and saving", "training (transformers)")  # fmt: skip
_GROUP_TITLES = {"logging": "logging and saving", "training": "training (transformers)", "vllm": "rollouts by vLLM"}
_GROUP_PREFIXES = {
    "logging": ("log", "save_", "hub_", "push_", "trackio_", "report_to", "output_dir", "run_name", "project",
                "disable_tqdm", "resume_from"),
    "evaluation": ("eval_",),
    "memory": ("gradient_checkpointing", "activation_checkpointing"),
    "several devices": ("fsdp", "deepspeed", "ddp_", "parallelism_config"),
}  # fmt: skip
_UNREAD = ("do_train", "local_rank")  # by no trainer
_METAVARS = {bool: "BOOL", int: "INT", float: "NUMBER"}


def parse_arguments(
    kinds: Sequence[type], argv: Sequence[str], program: str, rejected: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the arguments that the user set, converted: the YAML files of `--config` in order, then the command line.

    `kinds` are dataclasses whose fields are the arguments. `rejected` maps names that this command does not accept to remedies,
    in addition to those that no command accepts. `--help` prints the arguments in groups and exits, `--help-all` also those that
    never have an effect.
    """
    parser = TypedParser(kinds, prog=program, shows_inert=bool({"--help-all", "--help_all"} & {*argv}))
    refused = {**REJECTED, **(rejected or {})}
    namespace, rest = parser.parse_known_args([_known_name(token) for token in argv])
    check_names([token[2:].split("=")[0] for token in rest if token.startswith("--")], parser.hints, refused)
    if rest:
        raise ArgumentError(
            f"{_quote_stray_word(rest[0], argv)} belongs to no argument; write values after their --argument."
        )
    given = vars(namespace)
    settings: dict[str, Any] = {}
    for path in given.pop("config", ()):
        try:
            settings |= parser.read_file(path, refused)
        except ArgumentError as error:
            text = str(error)
            raise ArgumentError(text if path in text else f"{path}: {text}") from None
    return settings | parser.unwrap_single_items(given)


def argument_names(kind: type) -> set[str]:
    """Return the names of the arguments that a dataclass declares."""
    return {field.name for field in dataclasses.fields(kind) if field.init}


def pop_arguments(kind: type, given: dict[str, Any]) -> Any:
    """Remove the arguments that a dataclass declares from `given`, and return the dataclass with them."""
    return kind(**{name: given.pop(name) for name in argument_names(kind) & given.keys()})


def _quote_stray_word(word: str, argv: Sequence[str]) -> str:
    """Quote a word that belongs to no argument; hide it after an access token, of which it may be a part."""
    before = [_known_name(each)[2:].split("=")[0] for each in argv[: argv.index(word)] if each.startswith("--")]
    return f"A word after --{before[-1]}" if before and is_secret(before[-1]) else repr(word)


def _known_name(token: str) -> str:
    """Return `--learning-rate=1e-6` as `--learning_rate=1e-6`, and TRL's name of an argument as lowpeak's; values stay."""
    if not token.startswith("--"):
        return token
    written, equals, value = token.partition("=")
    name = written[2:].replace("-", "_")
    return f"--{ALIASES.get(name, name)}{equals}{value}"


def _without_aliases(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under lowpeak's names; ArgumentError for an argument under both names."""
    for alias, name in ALIASES.items():
        if alias in settings and name in settings:
            raise ArgumentError(f"{alias} and {name} set the same argument; set one.")
    return {ALIASES.get(name, name): value for name, value in settings.items()}


def set_environment(variables: Any) -> None:
    """Set environment variables from the `env` mapping of a YAML file, as TRL does."""
    if not isinstance(variables, dict):
        raise ArgumentError(f"env must be a mapping of environment variables to values, got {variables!r:.80}.")
    os.environ.update({str(name): str(value) for name, value in variables.items()})


class TypedParser(ErrorParser, HfArgumentParser):
    """HfArgumentParser with groups, `none` as a value and unions of types, which omits arguments that are not set."""

    def __init__(self, kinds: Sequence[type], prog: str, *, shows_inert: bool = False) -> None:
        self.hints: dict[str, Any] = {}
        self._shows_inert = shows_inert
        super().__init__(
            prog=prog,
            usage=f"{prog} [--config FILE.yaml] [--argument value ...]",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
        )
        self.add_argument(
            "--config",
            action="append",
            metavar="FILE",
            help="YAML file with defaults for any of the arguments below; a later file overrides earlier ones",
        )
        without_effect = "show this help with transformers' and TRL's arguments that have no effect here, and exit"
        self.add_argument("--help-all", "--help_all", action="help", help=without_effect)
        self.groups = {title: self.add_argument_group(title) for title in HELP_GROUPS}
        for kind in kinds:
            self._add_dataclass_arguments(kind)

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        hints = value_types(dtype)
        for declared in dataclasses.fields(dtype):
            if declared.init:
                self._add(declared, hints[declared.name])
                if not self._shows_inert and (declared.name in _UNREAD or is_inert(dtype, declared)):
                    self._option_string_actions[f"--{declared.name}"].help = argparse.SUPPRESS

    def _add(self, declared: dataclasses.Field[Any], hint: Any) -> None:
        """Declare a field by the base class with one type of its hint, then convert the hint's other types too."""
        name, simple = declared.name, _primary_type(hint)
        # If text alone is a value, as in `--report_to none`, a later one replaces it.
        extends = get_origin(simple) is list and str not in _alternatives(hint)
        field: Any = dataclasses.field(
            default=None, metadata={"help": _help(declared)} | ({"action": "extend"} if extends else {})
        )
        field.name, field.type = name, simple
        self._parse_dataclass_field(self.groups[_group_of(declared)], field)
        action = self._option_string_actions[f"--{name}"]
        action.option_strings = [f"--{name}"]  # --with-dashes is accepted, but not listed
        action.default = argparse.SUPPRESS
        action.type = _converter(action.type, simple, hint)
        action.metavar = _metavar(action, simple)
        if simple is bool:
            action.nargs, action.const = "?", True
        self.hints[name] = hint

    def read_file(self, path: str, rejected: Mapping[str, str]) -> dict[str, Any]:
        """Return the settings of a YAML file, converted as on the command line.

        None and mappings stay unchanged if the argument's type allows them.
        """
        settings = _without_aliases(load_yaml(path))
        set_environment(settings.pop("env", {}))
        settings = drop_trl_defaults(settings, self.hints)
        check_names(settings, self.hints, rejected)
        direct = {name for name, value in settings.items() if _is_final(value, _alternatives(self.hints[name]))}
        tokens = [token for name in settings if name not in direct for token in self._tokens(name, settings[name])]
        converted = self.unwrap_single_items(vars(self.parse_args(tokens)))
        return {name: value if name in direct else converted.get(name) for name, value in settings.items()}

    def _tokens(self, name: str, value: Any) -> list[str]:
        """Return a YAML value as the words of a command line."""
        action = self._option_string_actions[f"--{name}"]
        _check_yaml_value(name, value, takes_list=action.nargs == "+")
        if value is False and action.choices:
            value = "no"  # YAML 1.1 reads a bare `no` as false
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and str in _alternatives(self.hints[name]):
            return [f"--{name}", *map(str, values)]
        return [f"--{name}={each}" for each in values]

    def unwrap_single_items(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings, with a list of one item as the item if the argument may be a string (`--report_to none`)."""
        return {
            name: value[0]
            if isinstance(value, list) and len(value) == 1 and str in _alternatives(self.hints[name])
            else value
            for name, value in given.items()
        }


def _check_yaml_value(name: str, value: Any, takes_list: bool) -> None:
    if value is None:
        raise ArgumentError(f"{name} must have a value, got None.")
    if value == []:
        raise ArgumentError(f"{name} is an empty list: give values, or leave it out.")
    if isinstance(value, dict):
        raise ArgumentError(f"{name} does not take a mapping.")
    if isinstance(value, list) and not takes_list:
        raise ArgumentError(f"{name} does not take a list.")


def _union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the hint itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _alternatives(hint: Any) -> set[Any]:
    """Return the types that a hint allows, without their type arguments."""
    return {get_origin(each) or each for each in _union_members(hint)}


def _is_final(value: Any, kinds: set[Any]) -> bool:
    """Return whether a value of a YAML file needs no conversion: None, a mapping, or a list of mappings."""
    of_mappings = (
        isinstance(value, list) and list in kinds and bool(value) and all(type(each) is dict for each in value)
    )
    return of_mappings or type(value) in {type(None), dict} & kinds


def _primary_type(hint: Any) -> Any:
    """Return the type that HfArgumentParser declares an argument with; `_converter` handles the others of the hint."""
    members = [each for each in _union_members(hint) if each is not type(None)]
    listed = next((each for each in members if (get_origin(each) or each) in (list, tuple)), None)
    if listed is not None:
        item = get_args(listed)[0]
        return list[str] if str in members or get_origin(item) is dict else list[item]  # type: ignore[valid-type]
    enum = next((each for each in members if isinstance(each, EnumType)), None)
    if enum is not None:
        return enum
    return members[0] if members in ([bool], [int], [float]) else str


def _converter(base: Any, simple: Any, hint: Any) -> Callable[[str], Any]:
    """Return the converter of an argument's text: `base`, that of the simple type, extended to the hint's other types."""
    kinds = _alternatives(hint)
    if list[dict[str, Any]] in _union_members(hint):
        base = json_or_path
    elif dict in kinds:
        base = _json_or_text if str in kinds else _json
    elif simple is str and bool in kinds:
        base = _switch_or_text
    base = {string_to_bool: _switch, int: integer}.get(base, base)
    if type(None) not in kinds or {str, list} <= kinds:  # `--report_to none` is a text
        return cast(Callable[[str], Any], base)

    def convert(text: str) -> Any:
        return None if text.lower() in ("none", "null") else base(text)

    # argparse prints the name in its error.
    convert.__name__ = getattr(base, "__name__", "value")
    return convert


def _switch(text: str) -> bool:
    return bool(string_to_bool({"on": "true", "off": "false"}.get(text.lower(), text)))


def _switch_or_text(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


# argparse prints the name of this function in its error.
def integer(text: str) -> int:
    """Return the integer that a text denotes, 1e3 included."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _json_or_text(text: str) -> Any:
    return _json(text) if text.lstrip()[:1] in ("{", "[") else text


def json_or_path(text: str) -> dict[str, Any]:
    """Return the mapping of a JSON text, or `{"path": text}`."""
    return _json(text) if text.lstrip()[:1] == "{" else {"path": text}


def _json(text: str) -> dict[str, Any]:
    try:
        return read_object(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{MAPPING.requirement} ({error})") from None


def _metavar(action: argparse.Action, simple: Any) -> str:
    choices = list(action.choices or ())
    if choices and len(choices) <= 6:
        return "{" + ",".join(map(str, choices)) + "}"
    return _METAVARS.get(get_args(simple)[0] if get_args(simple) else simple, "VALUE")


def _group_of(declared: dataclasses.Field[Any]) -> str:
    """Return the help group of a field: as declared, or by the prefix of its name."""
    title = declaration(declared).group or next(
        (title for title, prefixes in _GROUP_PREFIXES.items() if declared.name.startswith(prefixes)), "training"
    )
    return _GROUP_TITLES.get(title, title)


def _help(declared: dataclasses.Field[Any]) -> str:
    text = " ".join(declaration(declared).split())
    first = text.partition(" ")[0]
    text = text[:1].upper() + text[1:] if first.islower() else text  # names such as vLLM stay
    default = getattr(declared.default, "value", declared.default)
    shown = "" if default in (None, "", dataclasses.MISSING) else f" (default: {default})"
    return (text.rstrip(".") + shown).strip().replace("%%", "%").replace("%", "%%") or " "

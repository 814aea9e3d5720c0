"""A command line and its YAML files to what the user gave: a file sets defaults, the command line overrides them.

Every field of the given dataclasses is an argument, and transformers' HfArgumentParser reads it. Only what the user gave is
passed on, so that a configuration's own defaults stay in one place; an unknown name is an error that says what may have been meant.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from transformers.hf_argparser import HfArgumentParser, string_to_bool

from lowpeak.arguments import MAPPING, REJECTED, check_names, drop_trl_defaults, is_secret, load_yaml, read_object
from lowpeak.cli.arguments import Parser
from lowpeak.errors import ArgumentError

# Names of TRL's command line that lowpeak spells differently, with what to write instead.
RENAMED = {
    "model_name_or_path": "use model",
    "model_revision": "use model_init_kwargs='{\"revision\": ...}'",
    "dtype": "use model_init_kwargs='{\"dtype\": ...}'",
    "attn_implementation": "use model_init_kwargs='{\"attn_implementation\": ...}'",
    "dataset_name": "use dataset (and dataset_config for the hub data set's configuration)",
    "dataset_train_split": "use dataset_split",
    "dataset_test_split": "use eval_split",
    "reward_funcs": "use reward",
    "reward_model_name_or_path": "use reward",
}

# The groups of `--help` in their order; those of the declarations whose title is another one; transformers' own by their names.
GROUPS = ("model", "data", "rewards", "generation", "rollouts by vLLM", "algorithm", "memory", "several devices", "evaluation",
          "logging and saving", "training (transformers)")  # fmt: skip
_TITLES = {"logging": "logging and saving", "training": "training (transformers)", "vllm": "rollouts by vLLM"}
_PREFIXES = {
    "logging": ("log", "save_", "hub_", "push_", "trackio_", "report_to", "output_dir", "run_name", "project",
                "disable_tqdm", "resume_from"),
    "evaluation": ("eval_",),
    "memory": ("gradient_checkpointing", "activation_checkpointing"),
    "several devices": ("fsdp", "deepspeed", "ddp_", "parallelism_config"),
}  # fmt: skip
_METAVARS = {bool: "BOOL", int: "INT", float: "NUMBER"}


def parse(
    kinds: Sequence[type], argv: Sequence[str], program: str, rejected: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what the user gave, converted: the YAML files of `--config` in their order, then the command line over them.

    `kinds` are dataclasses whose fields are the arguments. `rejected` are names that the command does not take, each with what to
    do instead, beside those that no command takes. `--help` prints the arguments in groups and exits.
    """
    parser = TypedParser(kinds, prog=program)
    refused = {**REJECTED, **RENAMED, **(rejected or {})}
    namespace, rest = parser.parse_known_args([_with_underscores(token) for token in argv])
    check_names([token[2:].split("=")[0] for token in rest if token.startswith("--")], parser.hints, refused)
    if rest:
        raise ArgumentError(f"{_stray(rest[0], argv)} belongs to no argument; values follow their --argument.")
    given = vars(namespace)
    settings: dict[str, Any] = {}
    for path in given.pop("config", ()):
        try:
            settings |= parser.read_file(path, refused)
        except ArgumentError as error:
            text = str(error)
            raise ArgumentError(text if path in text else f"{path}: {text}") from None
    return settings | parser.unwrapped(given)


def names_of(kind: type) -> set[str]:
    """Return the names of the arguments that a dataclass declares."""
    return {field.name for field in dataclasses.fields(kind) if field.init}


def _stray(word: str, argv: Sequence[str]) -> str:
    """Return a word that follows no argument, as an error shows it: behind an access token it may be the rest of that."""
    before = [_with_underscores(each)[2:].split("=")[0] for each in argv[: argv.index(word)] if each.startswith("--")]
    return f"A word behind --{before[-1]}" if before and is_secret(before[-1]) else repr(word)


def _with_underscores(token: str) -> str:
    """Return `--learning-rate=1e-6` as `--learning_rate=1e-6`; values are left alone."""
    name, equals, value = token.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if token.startswith("--") else token


class TypedParser(Parser, HfArgumentParser):
    """HfArgumentParser with groups, `none` as a value, unions of several types, and nothing where nothing was given."""

    def __init__(self, kinds: Sequence[type], prog: str) -> None:
        self.hints: dict[str, Any] = {}
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
            help="YAML file with defaults for any of the arguments below; of several files a later one goes over those before",
        )
        self.groups = {title: self.add_argument_group(title) for title in GROUPS}
        for kind in kinds:
            self._add_dataclass_arguments(kind)

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        hints = get_type_hints(dtype)
        for declared in dataclasses.fields(dtype):
            if declared.init:
                self._add(declared, hints[declared.name])

    def _add(self, declared: dataclasses.Field[Any], hint: Any) -> None:
        """Have the base read a field as the simplest type of its hint, then let the action read the hint's other types."""
        name, simple = declared.name, _simple(hint)
        listed = get_origin(simple) is list
        field: Any = dataclasses.field(
            default=None, metadata={"help": _help(declared)} | ({"action": "extend"} if listed else {})
        )
        field.name, field.type = name, simple
        self._parse_dataclass_field(self.groups[_group_of(declared)], field)
        action = self._option_string_actions[f"--{name}"]
        action.option_strings = [f"--{name}"]  # --with-dashes is taken, and not listed
        action.default = argparse.SUPPRESS
        action.type = _reader(action.type, simple, hint)
        action.metavar = _metavar(action, simple)
        if simple is bool:
            action.nargs, action.const = "?", True
        self.hints[name] = hint

    def read_file(self, path: str, rejected: Mapping[str, str]) -> dict[str, Any]:
        """Return the settings of a YAML file, each read as its text on the command line would be.

        None and mappings stand as they are where the argument takes them.
        """
        settings = drop_trl_defaults(load_yaml(path), self.hints)
        check_names(settings, self.hints, rejected)
        direct = {
            name for name, value in settings.items() if {type(value)} & {type(None), dict} & _kinds(self.hints[name])
        }
        tokens = [token for name in settings if name not in direct for token in self._tokens(name, settings[name])]
        found = self.unwrapped(vars(self.parse_args(tokens)))
        return {name: value if name in direct else found.get(name) for name, value in settings.items()}

    def _tokens(self, name: str, value: Any) -> list[str]:
        action = self._option_string_actions[f"--{name}"]
        if value is None:
            raise ArgumentError(f"{name} needs a value.")
        if isinstance(value, dict) or (isinstance(value, list) and action.nargs != "+"):
            raise ArgumentError(f"{name} takes no {'mapping' if isinstance(value, dict) else 'list'}.")
        if value is False and action.choices:
            value = "no"  # YAML 1.1 reads a bare `no` as false
        return [f"--{name}={each}" for each in (value if isinstance(value, list) else [value])]

    def unwrapped(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was given, a list of one as its item where the argument may be a plain string, too (`--report_to none`)."""
        return {
            name: value[0] if isinstance(value, list) and len(value) == 1 and str in _kinds(self.hints[name]) else value
            for name, value in given.items()
        }


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union; of any other hint, itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _kinds(hint: Any) -> set[Any]:
    """Return the alternatives of a hint, without what they hold."""
    return {get_origin(each) or each for each in _members(hint)}


def _simple(hint: Any) -> Any:
    """Return the one type as which HfArgumentParser can declare an argument; `_reader` takes the others of its hint."""
    members = [each for each in _members(hint) if each is not type(None)]
    listed = next((each for each in members if (get_origin(each) or each) in (list, tuple)), None)
    if listed is not None:
        return list[str] if str in members else list[get_args(listed)[0]]  # type: ignore[misc]
    enum = next((each for each in members if isinstance(each, type) and issubclass(each, Enum)), None)
    if enum is not None:
        return enum
    return members[0] if len(members) == 1 and members[0] in (bool, int, float) else str


def _reader(base: Any, simple: Any, hint: Any) -> Callable[[str], Any]:
    """Return what reads a word of an argument: `base`, which the simple type has, and before it what else the hint allows."""
    kinds = _kinds(hint)
    if dict in kinds:
        base = _json_or_text if str in kinds else _json
    elif simple is str and bool in kinds:
        base = _switch_or_text
    base = {string_to_bool: _switch, int: whole_number}.get(base, base)
    if type(None) not in kinds or str in kinds:
        return cast(Callable[[str], Any], base)

    def read(text: str) -> Any:
        return None if text.lower() in ("none", "null") else base(text)

    read.__name__ = getattr(base, "__name__", "value")  # argparse says it of a value that cannot be read
    return read


def _switch(text: str) -> bool:
    return bool(string_to_bool({"on": "true", "off": "false"}.get(text.lower(), text)))


def _switch_or_text(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def whole_number(text: str) -> int:  # argparse says its name of a value that it cannot read
    """Return the integer that a text is, also one such as 1e3."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if number != int(number):
            raise
        return int(number)


def _json_or_text(text: str) -> Any:
    return _json(text) if text.lstrip()[:1] in ("{", "[") else text


def _json(text: str) -> dict[str, Any]:
    try:
        return read_object(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{MAPPING.words} ({error})") from None


def _metavar(action: argparse.Action, simple: Any) -> str:
    choices = list(action.choices or ())
    if choices and len(choices) <= 6:
        return "{" + ",".join(map(str, choices)) + "}"
    return _METAVARS.get(get_args(simple)[0] if get_args(simple) else simple, "VALUE")


def _group_of(declared: dataclasses.Field[Any]) -> str:
    """Return what the declaration says, else by the name; transformers' other fields come last."""
    title = declared.metadata.get("group") or next(
        (title for title, prefixes in _PREFIXES.items() if declared.name.startswith(prefixes)), "training"
    )
    return _TITLES.get(title, title)


def _help(declared: dataclasses.Field[Any]) -> str:
    text = " ".join(declared.metadata.get("help", "").split())
    first = text.partition(" ")[0]
    text = text[:1].upper() + text[1:] if first.islower() else text  # a name such as vLLM stays
    default = getattr(declared.default, "value", declared.default)
    shown = "" if default in (None, "", dataclasses.MISSING) else f" (default: {default})"
    return (text.rstrip(".") + shown).strip().replace("%", "%%") or " "

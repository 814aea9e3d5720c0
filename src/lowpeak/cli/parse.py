"""A command line and its YAML file to configuration objects: the file sets defaults, the command line overrides them.

Every field of the given dataclasses is an argument. Only what the user gave is passed on, so that a configuration's own
defaults stay in one place; an unknown name is an error that says what may have been meant.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_origin, get_type_hints

from lowpeak.cli.groups import ORDER, group_of
from lowpeak.cli.renamed import RENAMED
from lowpeak.cli.values import choices, convert, expected, list_item, members
from lowpeak.config.secrets import HIDDEN, is_secret
from lowpeak.errors import ArgumentError


@dataclass(frozen=True)
class Argument:
    """One argument: its name, what its value must be, the group of its help, and its help."""

    name: str
    hint: Any
    group: str
    default: Any
    help: str

    def read(self, value: Any, where: str) -> Any:
        """The value converted; an error names the argument and where it stood."""
        try:
            return convert(self.hint, value)
        except ValueError as error:
            said = f"expects {expected(self.hint)}, not {HIDDEN}" if is_secret(self.name) else str(error)
            raise ArgumentError(f"{where}{self.name} {said}.") from None
        except RecursionError:
            raise ArgumentError(f"{where}{self.name} nests lists or mappings too deeply; correct it.") from None


def arguments_of(kind: type, group: str | None = None) -> list[Argument]:
    """The fields of a dataclass as arguments, all in `group`, or each where `groups.group_of` puts it."""
    hints = get_type_hints(kind)
    return [
        Argument(
            name=field.name,
            hint=hints[field.name],
            group=group or group_of(field.name, field.metadata),
            default=field.default if field.default is not dataclasses.MISSING else None,
            help=field.metadata.get("help", ""),
        )
        for field in dataclasses.fields(kind)
        if field.init
    ]


def parse(
    arguments: Sequence[Argument], argv: Sequence[str], program: str, rejected: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What the user gave, by name and converted: the YAML files of `--config` in their order, then the command line over them.

    `rejected` are names that the command does not take, each with what to do instead, beside those that no command takes.

    `--help` prints the arguments in groups and exits.
    """
    from lowpeak.config.load import merge

    known = {argument.name: argument for argument in arguments}
    rejected = rejected or {}
    namespace, rest = _make_parser(arguments, program).parse_known_args([_with_underscores(token) for token in argv])
    _check_names([token[2:].split("=")[0] for token in rest if token.startswith("--")], known, rejected)
    if rest:
        raise ArgumentError(f"{_stray(rest[0], argv)} belongs to no argument; values follow their --argument.")
    given = vars(namespace)
    settings: dict[str, Any] = {}
    for path in given.pop("config", ()):
        settings = merge(settings, _read_file(path, known, rejected))
    return merge(
        settings, {name: known[name].read(_unwrap(known[name].hint, value), "--") for name, value in given.items()}
    )


def _stray(word: str, argv: Sequence[str]) -> str:
    """A word that follows no argument, as an error shows it: what stands behind an access token may be the rest of it."""
    before = [_with_underscores(each)[2:].split("=")[0] for each in argv[: argv.index(word)] if each.startswith("--")]
    return f"A word behind --{before[-1]}" if before and is_secret(before[-1]) else repr(word)


def _read_file(path: str, known: Mapping[str, Argument], rejected: Mapping[str, str]) -> dict[str, Any]:
    from lowpeak.config.load import load_yaml
    from lowpeak.config.rejected import drop_trl_defaults

    settings = drop_trl_defaults(load_yaml(path), known)
    try:
        _check_names(settings, known, rejected)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None
    return {name: known[name].read(value, f"{path}: ") for name, value in settings.items()}


def _check_names(names: Iterable[str], known: Iterable[str], rejected: Mapping[str, str]) -> None:
    from lowpeak.config.load import check_names
    from lowpeak.config.rejected import REJECTED

    check_names(names, known, {**REJECTED, **RENAMED, **rejected})


def _with_underscores(token: str) -> str:
    """`--learning-rate=1e-6` as `--learning_rate=1e-6`; values are left alone."""
    name, equals, value = token.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if token.startswith("--") else token


def _unwrap(hint: Any, value: Any) -> Any:
    """A list of one as its item where the argument may be a plain string, too (`--report_to none`)."""
    return value[0] if isinstance(value, list) and len(value) == 1 and str in members(hint) else value


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are our errors, without the usage of two hundred arguments."""

    def error(self, message: str) -> NoReturn:
        """Raise it as ours."""
        raise ArgumentError(f"{message[:1].upper()}{message[1:]}; `{self.prog} --help` lists the arguments.")


def _make_parser(arguments: Sequence[Argument], program: str) -> Parser:
    parser = Parser(
        prog=program,
        usage=f"{program} [--config FILE.yaml] [--argument value ...]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
    )
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help="YAML file with defaults for any of the arguments below; of several files a later one goes over those before",
    )
    groups = {title: parser.add_argument_group(title) for title in ORDER}
    for argument in arguments:
        _add(groups[argument.group], argument)
    return parser


def _add(group: Any, argument: Argument) -> None:
    keywords: dict[str, Any] = {"dest": argument.name, "help": _help(argument), "metavar": _metavar(argument.hint)}
    if list_item(argument.hint) is not None:
        keywords |= {"nargs": "+", "action": "extend"}
    elif bool in members(argument.hint):
        keywords |= {"nargs": "?", "const": "true"}
    group.add_argument(f"--{argument.name}", **keywords)


def _metavar(hint: Any) -> str:
    allowed = choices(hint)
    if allowed and len(allowed) <= 6:
        return "{" + ",".join(str(choice) for choice in allowed) + "}"
    if str in members(hint):
        return "VALUE"
    words = {bool: "BOOL", int: "INT", float: "NUMBER"}
    kinds = (list_item(each) or get_origin(each) or each for each in members(hint))
    return next((words[kind] for kind in kinds if kind in words), "VALUE")


def _help(argument: Argument) -> str:
    text = " ".join(argument.help.split())
    first = text.partition(" ")[0]
    text = text[:1].upper() + text[1:] if first.islower() else text  # a name such as vLLM stays
    default = getattr(argument.default, "value", argument.default)
    shown = "" if default in (None, "") else f" (default: {default})"
    return (text.rstrip(".") + shown).strip().replace("%", "%%") or expected(argument.hint).replace("%", "%%")

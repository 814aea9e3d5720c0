"""Reading what the user wrote: YAML files and argument names. What the values mean is `resolve`'s.

Two ways in which YAML turns a setting into another one without a word are closed: numbers such as 1e-6, which YAML 1.1
reads as text, are numbers as in YAML 1.2, and a key that stands twice is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lowpeak.errors import ArgumentError, first_line


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's floats and without doubled keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key_node.value!r} stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file; an empty file has none.

    Raises ArgumentError where the file is missing, unreadable, not YAML (with the line) or not `name: value` lines.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ArgumentError(f"The config file {path} does not exist; check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"The config file {path} cannot be read: {error}; give a text file in UTF-8.") from error
    try:
        settings = yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ArgumentError(f"The config file {path} nests lists or mappings too deeply; correct it.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date with a 13th month
        raise ArgumentError(f"The config file {path} is not valid YAML: {_reason(error)}; correct it.") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise ArgumentError(f"The config file {path} must hold lines `name: value`, not a {type(settings).__name__}.")
    return settings


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, {error.problem}"
    return first_line(error)


def check_names(given: Iterable[str], known: Iterable[str], rejected: Mapping[str, str] | None = None) -> None:
    """Raise one ArgumentError that names every argument that is not known, each with what to do.

    `rejected` maps a name that TRL has and lowpeak has not to what to do instead; others get the closest known name.
    """
    names = sorted(known)
    wrong = [name for name in given if name not in set(names)]
    if wrong:
        raise ArgumentError(" ".join(_remedy(name, names, rejected or {}) for name in wrong))


def _remedy(name: str, known: list[str], rejected: Mapping[str, str]) -> str:
    if name in rejected:
        return f"The argument {name!r} is TRL's and does not exist in lowpeak: {rejected[name].rstrip('.')}."
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "see --help for those there are."
    return f"Unknown argument {name!r}; {hint}"

"""Reading what the user wrote: YAML files and argument names. What the values mean is `resolve`'s.

Two ways in which YAML turns a setting into another one without a word are closed: numbers such as 1e-6, which YAML 1.1
reads as text, are numbers as in YAML 1.2, and a key that stands twice is an error.
"""

from __future__ import annotations

import difflib
import json
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
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Return the settings in a YAML file; ArgumentError where it is missing, not YAML (with the line) or not `name: value`."""
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
        mark = getattr(error, "problem_mark", None)
        reason = f"line {mark.line + 1}, {getattr(error, 'problem', '')}" if mark else first_line(error)
        raise ArgumentError(f"The config file {path} is not valid YAML: {reason}; correct it.") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise ArgumentError(f"The config file {path} must hold lines `name: value`, not a {type(settings).__name__}.")
    return settings


def read_object(text: str) -> dict[str, Any]:
    """Return the mapping that a JSON text is; ValueError with the reason, and without the text, where it is none."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it nests lists or mappings too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}")
    return found


def check_names(given: Iterable[str], known: Iterable[str], rejected: Mapping[str, str]) -> None:
    """Raise one ArgumentError for all names that are not known: with the remedy that `rejected` has, or the closest name."""
    names = sorted(known)
    told: list[str] = []
    for name in given:
        if name in names:
            continue
        if name in rejected:
            told.append(f"The argument {name!r} is TRL's and does not exist in lowpeak: {rejected[name]}.")
            continue
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "see --help for those there are."
        told.append(f"Unknown argument {name!r}; {hint}")
    if told:
        raise ArgumentError(" ".join(told))

"""Reading what the user wrote: YAML files and argument names. What the values mean is `resolve`'s.

Two ways in which YAML turns a setting into another one without a word are closed: numbers such as 1e-6, which YAML 1.1
reads as text, are numbers as in YAML 1.2, and a key that stands twice is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lowpeak.errors import ArgumentError, first_line

HIDDEN = "<hidden>"
_TEXTS = ("eos_token", "pad_token")  # a tokenizer's
_USER = re.compile(r"(?<=://)[^/\s'\",]*@")  # a user, and a password, before a URL's host


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


def parse_bytes(text: int | str) -> int | None:
    """Return the number of bytes of `8GiB`, `500MB`, `4096`: 1024 to a KiB and 1000 to a KB; None for what is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i)?B?", str(text).strip(), re.IGNORECASE)
    if match is None:
        return None
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def is_secret(name: str) -> bool:
    """Return whether an argument of this name holds an access token."""
    return name == "token" or (name.endswith("_token") and name not in _TEXTS)


def hide_secrets(values: Mapping[str, Any], shown: str | None = HIDDEN) -> dict[str, Any]:
    """Return arguments with `shown` in place of each access token that is set, in nested dictionaries too.

    URLs are shown without the user and the password before their host.
    """
    return {name: _hidden(name, value, shown) for name, value in values.items()}


def _hidden(name: str, value: Any, shown: str | None) -> Any:
    if is_secret(name) and isinstance(value, str | dict | list | tuple):
        return shown
    if type(value) is dict:
        return hide_secrets(value, shown)
    if type(value) is list:
        return [_hidden(name, each, shown) for each in value]
    return hide_user(value) if type(value) is str else value


def hide_user(text: str) -> str:
    """Return text with what stands before the host of its URLs hidden."""
    return _USER.sub(f"{HIDDEN}@", text)


def show(name: str, value: Any) -> str:
    """Return an argument with its value, for a sentence."""
    return f"{name}={HIDDEN}" if is_secret(name) else hide_user(f"{name}={value!r}")

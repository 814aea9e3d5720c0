"""Arguments as text: read from YAML, JSON and byte sizes, and shown without access tokens.

Unlike PyYAML, numbers such as 1e-6 are numbers (as in YAML 1.2), not text, and a duplicate key is an error.
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
_TOKENIZER_TOKENS = ("eos_token", "pad_token")
# The user and password before the host of a URL.
_USER = re.compile(r"(?<=://)[^/\s'\",]*@")


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's floats, which rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Return the settings in a YAML file; ArgumentError if it is missing, not YAML, or not `name: value` lines."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ArgumentError(f"The config file {path} does not exist; check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"The config file {path} cannot be read: {error}; use a text file in UTF-8.") from error
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
    if not isinstance(settings, dict):
        raise ArgumentError(f"The config file {path} must have lines `name: value`, got a {type(settings).__name__}.")
    for name in settings:
        if not isinstance(name, str):
            raise ArgumentError(
                f"The config file {path} has the name {name!r}, which is not text; write `name: value`."
            )
    return settings


def read_object(text: str) -> dict[str, Any]:
    """Return the mapping that a JSON text denotes; ValueError with the reason, but without the text, otherwise."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it nests lists or mappings too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is of type {type(value).__name__}")
    return value


def parse_bytes(text: int | str) -> int | None:
    """Return the bytes of a size such as `8GiB` (1024**3), `500MB` (1000**2), `4096` or `1e9`; None for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([KMGT]?)(i)?B?", str(text).strip(), re.IGNORECASE)
    if match is None:
        return None
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def byte_unit(number: float) -> tuple[str, int]:
    """Return the largest of GiB, MiB and KiB that a number of bytes reaches, KiB below, and its bytes."""
    return next(
        ((unit, size) for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)) if number >= size), ("KiB", 1 << 10)
    )


def show_bytes(number: float) -> str:
    """Return bytes as a text such as `80 GiB` or `1.25 MiB`."""
    unit, size = byte_unit(number)
    return f"{round(number / size, 2):g} {unit}"


def show_seconds(seconds: float) -> str:
    """Return a duration as a text such as `3.9 h`, `12 min` or `0.85 s`."""
    unit, size = ("h", 3600) if seconds >= 3600 else ("min", 60) if seconds >= 100 else ("s", 1)
    number = seconds / size
    return f"{number:,.0f} {unit}" if number >= 10 else f"{number:.2g} {unit}"


def is_secret(name: str) -> bool:
    """Return whether an argument of this name is an access token."""
    return name == "token" or (name.endswith("_token") and name not in _TOKENIZER_TOKENS)


def hide_secrets(values: Mapping[str, Any], shown: str | None = HIDDEN) -> dict[str, Any]:
    """Return arguments with `shown` in place of each access token, also in nested dictionaries.

    In URLs, the user and password before the host are hidden.
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
    """Return text with the user and password in its URLs hidden."""
    return _USER.sub(f"{HIDDEN}@", text)


def show(name: str, value: Any) -> str:
    """Return `name=value` for a message, with secrets hidden."""
    return f"{name}={HIDDEN}" if is_secret(name) else hide_user(f"{name}={getattr(value, 'value', value)!r}")

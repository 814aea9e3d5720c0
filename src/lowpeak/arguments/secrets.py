"""Arguments that hold access tokens, which no file, log line or model card shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"
_TEXTS = ("eos_token", "pad_token")  # a tokenizer's
_USER = re.compile(r"(?<=://)[^/\s'\",]*@")  # a user, and a password, before a URL's host


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

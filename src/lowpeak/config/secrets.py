"""Arguments that hold access tokens, which no file, log line or model card shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"
_TEXTS = ("eos_token", "pad_token")  # a tokenizer's


def is_secret(name: str) -> bool:
    """Return whether an argument of this name holds an access token."""
    return name == "token" or (name.endswith("_token") and name not in _TEXTS)


def hide_secrets(values: Mapping[str, Any], shown: str | None = HIDDEN) -> dict[str, Any]:
    """Return arguments with `shown` in place of each access token that is set, in nested dictionaries too."""
    return {name: _hidden(name, value, shown) for name, value in values.items()}


def _hidden(name: str, value: Any, shown: str | None) -> Any:
    if type(value) is dict:
        return hide_secrets(value, shown)
    return shown if isinstance(value, str) and is_secret(name) else value


def show(name: str, value: Any) -> str:
    """Return an argument with its value, for a sentence."""
    return f"{name}={HIDDEN}" if is_secret(name) else f"{name}={value!r}"

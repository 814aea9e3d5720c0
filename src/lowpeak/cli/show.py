"""What a dry run prints: YAML, so that people and programs can read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowpeak.config.secrets import hide_secrets


def dump(resolved: Any) -> str:
    """What a dry run resolved, as YAML without access tokens; values that YAML has no word for are shown as text."""
    import yaml

    return yaml.safe_dump(hide_secrets(plain(resolved)), sort_keys=False, allow_unicode=True, width=110)


def plain(value: Any) -> Any:
    """Mappings, sequences and scalars as YAML knows them, anything else as its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)

"""Output of commands: messages on stderr, printed once per host, and the YAML of a dry run."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowpeak.arguments import hide_secrets
from lowpeak.errors import show_controls


def print_once(message: str) -> None:
    """Write a line to stderr, unless another rank of the same torch agent has written it already."""
    # The agent puts the ranks' error folders into one folder: the rank that first creates a file there prints.
    folder = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if folder is not None:
        try:
            name = f"lowpeak-{hashlib.sha256(message.encode()).hexdigest()[:16]}"
            (Path(folder).parents[1] / name).touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:  # no such folder
            pass
    print(show_controls(message), file=sys.stderr, flush=True)


def to_yaml(resolved: Any) -> str:
    """Return the plan of a dry run as YAML, without access tokens."""
    import yaml

    return yaml.safe_dump(hide_secrets(_to_yaml_types(resolved)), sort_keys=False, allow_unicode=True, width=110)


def _to_yaml_types(value: Any) -> Any:
    """Return mappings, sequences and scalars as YAML types, and anything else as its text."""
    if isinstance(value, Mapping):
        return {str(key): _to_yaml_types(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_yaml_types(each) for each in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)

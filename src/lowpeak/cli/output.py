"""Output of commands: messages on stderr, printed once per host, and the YAML of a dry run."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowpeak.arguments import hide_secrets
from lowpeak.errors import show_controls


def print_once(message: str) -> None:
    """Write a line to stderr, unless another rank of the same torch agent already has."""
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


def hide_bars_in_files() -> None:
    """Hide the bars of loading and mapping unless stderr is a terminal: a file would have each of their states."""
    if not sys.stderr.isatty():
        from datasets import disable_progress_bars
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        disable_progress_bars()


@contextmanager
def show_log(args: Any) -> Iterator[None]:
    """Show lowpeak's messages from `log_level` on, by default from INFO: generation path, layout, storage, sizes."""
    # transformers' "passive" keeps Python's level, which shows warnings and errors only.
    level = logging.INFO if args.log_level == "passive" else args.get_process_log_level()
    logger, handler = logging.getLogger("lowpeak"), logging.StreamHandler()
    previous_level = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(previous_level)
        logger.removeHandler(handler)


def to_yaml(resolved: Any) -> str:
    """Return the plan of a dry run as YAML, without access tokens."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """A dumper that writes texts of several lines as they are."""

    def write_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, write_text)
    plain = hide_secrets(_to_yaml_types(resolved))
    return yaml.dump(plain, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def _to_yaml_types(value: Any) -> Any:
    """Return mappings, sequences and scalars as YAML types, and anything else as its text."""
    if isinstance(value, Mapping):
        return {str(key): _to_yaml_types(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_yaml_types(each) for each in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)

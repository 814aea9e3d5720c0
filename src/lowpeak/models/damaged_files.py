"""Damaged files of a model or checkpoint folder.

Libraries' errors seldom name the file that they could not read. After a failed load the files are read one by one here.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from lowpeak.errors import LowpeakError


@contextmanager
def name_damaged_file(folder: str | Path, kind: type[LowpeakError], remedy: str) -> Iterator[None]:
    """Raise `kind`, naming the file and the remedy, if the block fails and a file of `folder` is damaged."""
    try:
        yield
    except Exception as error:
        damaged = None if isinstance(error, LowpeakError) else find_damaged_file(Path(folder))
        if damaged is None:
            raise
        file, reason = damaged
        raise kind(f"{file} is damaged (truncated or changed: {type(reason).__name__}): {remedy}.") from error


def find_damaged_file(folder: Path) -> tuple[Path, Exception] | None:
    """Return the first file of `folder` that cannot be read, and the reason; None if there is none.

    Only headers and structure are read: a changed value inside a tensor is not detected.
    """
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        read = next((read for pattern, read in _READERS.items() if file.match(pattern)), None)
        if read is None or not file.is_file():
            continue
        try:
            read(file)
        except PermissionError:
            continue
        except Exception as error:
            return file, error
    return None


def check_generation_config(folder: Path) -> None:
    """Read a folder's generation_config.json, and raise if it is damaged.

    transformers would silently use its defaults, without the model's end tokens.
    """
    file = folder / "generation_config.json"
    if file.is_file():
        _read_settings(file)


def _read_settings(file: Path) -> None:
    if not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
        raise ValueError("not a JSON object")


def _read_pickle(file: Path) -> None:
    torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))


_READERS: dict[str, Callable[[Path], object]] = {
    "*config.json": _read_settings,
    "tokenizer.json": lambda file: Tokenizer.from_file(str(file)),
    "*.json": lambda file: json.loads(file.read_text(encoding="utf-8")),
    "*.safetensors": lambda file: safe_open(file, framework="pt"),
    "*.pt": _read_pickle,
    "pytorch_model*.bin": _read_pickle,
    "adapter_model.bin": _read_pickle,
}

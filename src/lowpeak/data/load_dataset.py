"""Loading of datasets from files, folders or the hub.

Every failure is a DataError with the remedy. Local paths are never looked up on the hub. With HF_HUB_OFFLINE=1 nothing is
looked up: a name is then read from the local cache, or fails at once.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset

from lowpeak.errors import DataError, first_line

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_FORMATS = ", ".join(_BUILDERS)
_BLOCK = 1 << 20  # bytes
_TEXT_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".txt")


def open_dataset(
    source: str | Path | Sequence[str | Path],
    split: str | None = None,
    name: str | None = None,
    *,
    streaming: bool = False,
    **location: Any,
) -> Dataset | IterableDataset:
    """Return one split of the dataset at `source`.

    `source` is a .json, .jsonl, .parquet or .csv file, a list or a glob of such files, a folder written by `save_to_disk`, a
    folder with data files, or a name on the hub. `split` may be a slice such as "train[:100]" if `datasets` supports slices;
    None is "train", or the only split. `name` is the configuration of a dataset on the hub. `location` is `data_dir`
    and `data_files` of `datasets.load_dataset`, for a hub name, a folder or a format ("json"). Raises DataError.
    """
    if location:
        return _load(str(source), split, streaming, path=str(source), name=name, **location)
    paths = _local_paths(source)
    if paths is None:
        return _open_hub(str(source), split, name, streaming)
    if name is not None:
        raise DataError(f"The configuration {name!r} has no effect on local data ({source}); remove it.")
    if paths[0].is_dir():
        return _open_folder(paths[0], split, streaming)
    _check_utf8(paths)
    # Escaped, because `datasets` reads each path as a pattern: it would search `rows1.json` for `rows[1].json`.
    files = [glob.escape(str(path)) for path in paths]
    return _load(str(source), split, streaming, path=_builder(paths), data_files=files)


def is_on_hub(source: str) -> bool:
    """Return whether a source of `open_dataset` is a dataset on the hub."""
    return _local_paths(source) is None


def _local_paths(source: str | Path | Sequence[str | Path]) -> list[Path] | None:
    """Return the files, or the folder, at `source`; None for a name on the hub.

    Raises DataError if one does not exist.
    """
    paths = _one_path(source) if isinstance(source, str | Path) else [Path(path).expanduser() for path in source]
    if paths is None:
        return None
    if not paths:
        raise DataError("The list of data files is empty; name at least one.")
    folders = [path for path in paths if path.is_dir()]
    if folders and len(paths) > 1:
        raise DataError(f"{folders[0]} is a folder among several data files; pass files only, or one folder.")
    for path in paths:
        if not path.exists():
            raise DataError(f"The data file or folder {path} does not exist; check the path.")
    return paths


def _one_path(source: str | Path) -> list[Path] | None:
    """Return the path, or the files that match a pattern; None for a name on the hub."""
    path = Path(source).expanduser()
    if path.exists():
        return [path]
    if glob.has_magic(str(source)):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        if not matches:
            raise DataError(f"No file matches {source}; check the pattern and the folder.")
        return matches
    is_hub_name = _HUB_NAME.fullmatch(str(source)) is not None and path.suffix not in _BUILDERS
    return None if is_hub_name else [path]


def _builder(paths: Sequence[Path]) -> str:
    """Return the name of the `datasets` builder for these files, which must have one format."""
    builders = {_BUILDERS.get(path.suffix.lower()) for path in paths}
    if None in builders or len(builders) > 1:
        suffixes = ", ".join(sorted({path.suffix or path.name for path in paths}))
        raise DataError(f"Data files must all have one format of {_FORMATS}, got {suffixes}: convert or rename them.")
    return str(builders.pop())


def _check_utf8(paths: Sequence[Path]) -> None:
    """Raise DataError for the first text file that is not UTF-8."""
    # Some readers of `datasets` would raise only when a row is used.
    for path in paths:
        if path.suffix.lower() in _TEXT_SUFFIXES and path.is_file():
            try:
                _decode_lines(path)
            except OSError as error:
                raise _unreadable(str(path), error) from error


def _decode_lines(path: Path) -> None:
    """Raise DataError with the line and the byte that is not UTF-8, if any."""
    num_lines = 0
    with path.open("rb") as file:
        while lines := file.readlines(_BLOCK):
            try:
                b"".join(lines).decode()
            except UnicodeDecodeError as error:
                line = num_lines + error.object.count(b"\n", 0, error.start) + 1
                raise DataError(
                    f"The data file {path} is not UTF-8: line {line} has the byte 0x{error.object[error.start]:02x} "
                    f"({error.reason}); convert the file to UTF-8."
                ) from error
            num_lines += len(lines)


def _open_folder_of_files(folder: Path, split: str | None, streaming: bool) -> Dataset | IterableDataset:
    if glob.has_magic(str(folder)):
        raise DataError(
            f"The folder {folder} has one of []*? in its name, which is read as a pattern: rename it, or pass its files."
        )
    files = sorted(folder.rglob("*"))
    _check_utf8([file for file in files if file.suffix.lower() in _BUILDERS] or files)
    return _load(str(folder), split, streaming, path=str(folder))


def _open_folder(folder: Path, split: str | None, streaming: bool) -> Dataset | IterableDataset:
    if not any((folder / file).exists() for file in ("dataset_dict.json", "state.json")):
        return _open_folder_of_files(folder, split, streaming)
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise _unreadable(str(folder), error) from error
    if isinstance(dataset, Mapping):
        dataset = _select_split(dataset, split, str(folder))
    elif split is not None and split != str(dataset.split):
        raise DataError(f"The folder {folder} contains one dataset without splits; remove split={split!r}.")
    return dataset.to_iterable_dataset() if streaming else dataset


def _open_hub(source: str, split: str | None, name: str | None, streaming: bool) -> Dataset | IterableDataset:
    try:
        return _load(source, split, streaming, path=source, name=name)
    except DataError as error:
        if not isinstance(error.__cause__, ConnectionError | FileNotFoundError):
            raise
        if datasets.config.HF_HUB_OFFLINE:
            raise DataError(
                f"{source} is neither a local path nor in the local cache, and HF_HUB_OFFLINE disables the hub; check the path, "
                "or unset HF_HUB_OFFLINE once to download it."
            ) from error
        raise DataError(
            f"{source} is neither a local path nor a dataset available on the hub ({first_line(error.__cause__)}); "
            "check the path or the name, log in if it is private, and check the network."
        ) from error


def _load(source: str, split: str | None, streaming: bool, **arguments: Any) -> Dataset | IterableDataset:
    """Return one split, or a slice of one, by `datasets.load_dataset`."""
    # `load_dataset` selects slices itself. Other splits are selected here, so that an error can list them.
    sliced = split if split is not None and re.search(r"[\[+]", split) else None
    try:
        loaded = datasets.load_dataset(**arguments, split=sliced, streaming=streaming)
    except StopIteration as error:
        # Raised for a JSON file of 0 bytes.
        raise DataError(f"The dataset {source} is empty; check the file.") from error
    except Exception as error:
        # Builders raise any error of their file formats' libraries.
        raise _unreadable(source, error) from error
    return loaded if sliced else _select_split(loaded, split, source)


def _select_split(splits: Mapping[Any, Any], split: str | None, source: str) -> Any:
    available = {str(key): value for key, value in splits.items()}
    selected = split if split is not None else "train" if len(available) > 1 else next(iter(available), "train")
    if selected not in available:
        names = ", ".join(available) or "none"
        raise DataError(f"The dataset {source} has no split {selected!r}; it has {names}: set split to one of them.")
    return available[selected]


def _unreadable(source: str, error: Exception) -> DataError:
    return DataError(f"The dataset {source} cannot be read: {first_line(error.__cause__ or error)}; check its files.")

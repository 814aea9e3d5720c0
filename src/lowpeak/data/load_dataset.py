"""Opening a data set by what a user names it: a file, files, a folder, or a name on the hub.

Everything that can go wrong ends in one DataError with the remedy. What is local is never looked up on the hub, and
with HF_HUB_OFFLINE=1 nothing is looked up at all: a name is then read from the local cache or fails at once.
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
_KINDS = ", ".join(_BUILDERS)
_BLOCK = 1 << 20
_TEXT = (".json", ".jsonl", ".csv", ".tsv", ".txt")


def open_dataset(
    source: str | Path | Sequence[str | Path],
    split: str | None = None,
    name: str | None = None,
    *,
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """Return one split of the data set that `source` names.

    `source` is a .json, .jsonl, .parquet or .csv file, a list or a glob of such files, a folder that `save_to_disk`
    wrote, a folder with data files, or a name on the hub. `split` may be a slice such as "train[:100]" where `datasets`
    knows slices; None takes "train", or the only split. `name` is the hub data set's configuration. Raises DataError.
    """
    paths = _local_paths(source)
    if paths is None:
        return _open_hub(str(source), split, name, streaming)
    if name is not None:
        raise DataError(f"The configuration {name!r} has no meaning for local data ({source}); leave it out.")
    if paths[0].is_dir():
        return _open_folder(paths[0], split, streaming)
    _check_utf8(paths)
    # Escaped, because `datasets` takes each of them for a pattern: `rows[1].json` would be looked for as `rows1.json`.
    files = [glob.escape(str(path)) for path in paths]
    return _load(str(source), split, streaming, path=_builder(paths), data_files=files)


def is_on_hub(source: str) -> bool:
    """Return whether a source that `open_dataset` takes names a data set on the hub, not a file or a folder."""
    return _local_paths(source) is None


def _local_paths(source: str | Path | Sequence[str | Path]) -> list[Path] | None:
    """Return the local files or the folder meant by `source`, all there; None for a name on the hub."""
    if not isinstance(source, str | Path) and not source:
        raise DataError("The list of data files is empty; name at least one.")
    paths = _one_path(source) if isinstance(source, str | Path) else [Path(path).expanduser() for path in source]
    if paths is None:
        return None
    folders = [path for path in paths if path.is_dir()]
    if folders and len(paths) > 1:
        raise DataError(f"{folders[0]} is a folder among several data files; name files only, or one folder.")
    for path in paths:
        if not path.exists():
            raise DataError(f"The data file or folder {path} does not exist; check the path.")
    return paths


def _one_path(source: str | Path) -> list[Path] | None:
    """Return the path itself, what a pattern matches, or None for a name on the hub."""
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
    """Return the reader of `datasets` for these files, which must be of one kind."""
    builders = {_BUILDERS.get(path.suffix.lower()) for path in paths}
    if None in builders or len(builders) > 1:
        suffixes = ", ".join(sorted({path.suffix or path.name for path in paths}))
        raise DataError(f"Data files must be of one kind of {_KINDS}; these are {suffixes}: convert or rename them.")
    return str(builders.pop())


def _check_utf8(paths: Sequence[Path]) -> None:
    """Raise DataError for the first text file that is not UTF-8: some readers of `datasets` notice when a row is used."""
    for path in paths:
        if path.suffix.lower() in _TEXT and path.is_file():
            try:
                _check_text(path)
            except OSError as error:
                raise _unreadable(str(path), error) from error


def _check_text(path: Path) -> None:
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


def _open_folder(folder: Path, split: str | None, streaming: bool) -> Dataset | IterableDataset:
    saved = any((folder / file).exists() for file in ("dataset_dict.json", "state.json"))
    if not saved and glob.has_magic(str(folder)):
        raise DataError(
            f"The folder {folder} has one of []*? in its name, which is read as a pattern: rename it, or name its files."
        )
    if not saved:
        files = sorted(folder.rglob("*"))
        _check_utf8([file for file in files if file.suffix.lower() in _BUILDERS] or files)
        return _load(str(folder), split, streaming, path=str(folder))
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise _unreadable(str(folder), error) from error
    if isinstance(found, Mapping):
        found = _pick(found, split, str(folder))
    elif split is not None and split != str(found.split):
        raise DataError(f"The folder {folder} holds one data set without splits; leave split={split!r} out.")
    return found.to_iterable_dataset() if streaming else found


def _open_hub(source: str, split: str | None, name: str | None, streaming: bool) -> Dataset | IterableDataset:
    try:
        return _load(source, split, streaming, path=source, name=name)
    except DataError as error:
        if not isinstance(error.__cause__, ConnectionError | FileNotFoundError):
            raise
        if datasets.config.HF_HUB_OFFLINE:
            raise DataError(
                f"{source} is neither a local path nor in the local cache, and the hub is switched off "
                "(HF_HUB_OFFLINE); check the path, or go online once to download it."
            ) from error
        raise DataError(
            f"{source} is neither a local path nor a data set that the hub can give ({first_line(error.__cause__)}); "
            "check the path or the name, log in if it is private, and check the network."
        ) from error


def _load(source: str, split: str | None, streaming: bool, **arguments: Any) -> Dataset | IterableDataset:
    """`datasets.load_dataset`, which takes slices itself; whole splits are picked here, so that errors name them."""
    sliced = split if split is not None and re.search(r"[\[+]", split) else None
    try:
        found = datasets.load_dataset(**arguments, split=sliced, streaming=streaming)
    except StopIteration as error:  # a JSON file without a byte
        raise DataError(f"The data set {source} is empty; check the file.") from error
    except Exception as error:  # builders raise whatever their file formats' libraries raise
        raise _unreadable(source, error) from error
    return found if sliced else _pick(found, split, source)


def _pick(splits: Mapping[Any, Any], split: str | None, source: str) -> Any:
    there = {str(key): value for key, value in splits.items()}
    wanted = split if split is not None else "train" if len(there) > 1 else next(iter(there), "train")
    if wanted not in there:
        remedy = f"it has {', '.join(there) or 'none'}"
        raise DataError(f"The data set {source} has no split {wanted!r}; {remedy}: set split to one of them.")
    return there[wanted]


def _unreadable(source: str, error: Exception) -> DataError:
    return DataError(f"The data set {source} cannot be read: {first_line(error.__cause__ or error)}; check it.")

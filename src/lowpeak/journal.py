"""The journal of a run: one JSON line per step in `steps.jsonl`, one per completion in `rollouts.jsonl`.

pandas (`read_json(path, lines=True)`) and polars (`read_ndjson(path, infer_schema_length=None)`) read both files. A
line is one append, so a kill between lines leaves whole ones. Linux can end even one write early when it kills (seen
with lines of 100 kB, none with 4 kB): such a torn last line is left out by `read_steps` and gone once a run resumes.
NaN and infinities become null: JSON has neither.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowpeak.checkpoint import open_no_link, sync
from lowpeak.errors import CheckpointError

STEPS = "steps"
ROLLOUTS = "rollouts"

_INT64 = 2**63
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

logger = logging.getLogger(__name__)


class Journal:
    """Writes a run's steps and rollouts below `folder`; one process (rank 0) writes, and `writes=False` on the others.

    Files that an earlier run left there are kept as `steps.1.jsonl`, `rollouts.1.jsonl`, ... when the first line is
    written, unless `resume_at` says that this run continues them. A full disk raises `CheckpointError`.
    """

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self.folder = folder
        self._writes = writes
        self._ours = False  # whether the files below `folder` belong to this run
        self._written = False

    def check(self) -> None:
        """Raise CheckpointError if something else has the place of the folder or of a file."""
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file, and the journal needs a folder there: move or remove it.")
        for path in _paths(self.folder):
            if path.is_dir():
                raise CheckpointError(f"{path} is a folder, and the journal writes a file there: move or remove it.")
            if path.is_symlink() or path.exists():
                os.close(open_no_link(path, os.O_RDONLY))

    def resume_at(self, step: int) -> None:
        """Continue the files as they were after `step`: lines of later steps, and a torn last line, are removed.

        Each file is replaced by a synced copy, so a kill leaves the old lines or the new ones.
        """
        if not self._writes:
            return
        with _writing(self.folder):
            for path in _paths(self.folder):
                if path.exists():
                    _keep_until(path, step)
        self._ours = True

    def write_step(self, step: int, row: Mapping[str, Any]) -> None:
        """Append the metrics of one optimizer step."""
        self._append(STEPS, step, [row])

    def write_rollout(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per completion (prompt, completion, rewards, advantage); `step` is the first it serves."""
        self._append(ROLLOUTS, step, rows)

    def sync(self) -> None:
        """Wait until all lines are on the disk: a checkpoint must not outlive the steps that led to it."""
        if not self._writes:
            return
        with _writing(self.folder):
            for path in _paths(self.folder):
                if path.exists():
                    sync(path)

    def _append(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        if not self._writes:
            return
        with _writing(self.folder):
            if self._written and not self.folder.exists():
                self._warn_of_removal(step)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._written = True
            if not self._ours:
                _set_aside(self.folder)
                self._ours = True
            path = self.folder / f"{name}.jsonl"
            with os.fdopen(open_no_link(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0) as file:
                for row in rows:
                    _append_line(file.fileno(), {"step": step} | dict(row) | {"step": step})

    def _warn_of_removal(self, step: int) -> None:
        removed = self.folder if self.folder.parent.exists() else self.folder.parent
        held = "lines" if removed == self.folder else "lines and checkpoints"
        logger.warning(
            "%s was removed while the run wrote into it: the %s that it held from before step %d are gone, and the run goes on in "
            "a new folder.",
            removed,
            held,
            step,
        )


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `steps.jsonl` in order, without a torn last line; none if nothing was written."""
    path = folder / f"{STEPS}.jsonl"
    return [row for _, row in _rows(path)] if path.exists() else []


def _paths(folder: Path, number: str = "") -> list[Path]:
    return [folder / f"{name}{number}.jsonl" for name in (STEPS, ROLLOUTS)]


def _plain(value: Any) -> Any:
    """Return the value as what JSON and 64-bit readers can hold; arrays and tensors as lists, anything unknown as its str."""
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _append_line(descriptor: int, row: Mapping[str, Any]) -> None:
    """Append the row by one write; a line that the disk cuts short is taken back, so that the file stays readable."""
    # A lone surrogate, which tokenizers can make and readers refuse, becomes a question mark.
    line = _ENCODER.encode(_plain(row)).encode("utf-8", "replace") + b"\n"
    start = os.fstat(descriptor).st_size
    written = 0
    try:
        while written < len(line):  # a second write happens only to learn why the first was short
            written += os.write(descriptor, line[written:])
    except BaseException:
        os.ftruncate(descriptor, start)
        raise


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each whole line with its row; a torn last line, and what a power failure left, is passed over."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and type(row.get("step")) is int:
                yield line, row
            else:
                logger.warning("%s: line %d is cut off or damaged and is left out.", path, number)


def _keep_until(path: Path, step: int) -> None:
    copy = path.with_name(f"{path.name}.new")
    with os.fdopen(open_no_link(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.writelines(line for line, row in _rows(path) if row["step"] <= step)
        file.flush()
        os.fsync(file.fileno())
    os.replace(copy, path)
    sync(path.parent)


def _set_aside(folder: Path) -> None:
    """Give the files of an earlier run the first number that is free for both, without a torn last line."""
    numbered = (_paths(folder, f".{number}") for number in itertools.count(1))
    free = next(paths for paths in numbered if not any(path.exists() for path in paths))
    for path, aside in zip(_paths(folder), free, strict=True):
        if path.exists():
            _drop_torn_line(path)
            os.replace(path, aside)


def _drop_torn_line(path: Path) -> None:
    with os.fdopen(open_no_link(path, os.O_RDWR), "rb+") as file:
        if path.stat().st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                end = data.rfind(b"\n") + 1
            file.truncate(end)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        message = f"cannot write the journal in {folder}: {error.strerror}; the lines before are whole"
        remedy = "Make room" if error.errno in _FULL else "Make it writable"
        raise CheckpointError(f"{message}. {remedy} or choose another output_dir, and resume.") from error

"""The journal of a run, in JSON lines.

    run.jsonl           each start of the run: algorithm, model, data, rewards, arguments, devices, versions
    steps.jsonl         the metrics of each optimizer step
    rollouts.jsonl      each completion, with its rewards
    tokens.jsonl        token values of some completions: text, log-prob, entropy, mismatch and loss mask
    evaluations.jsonl   the metrics of each evaluation during training
    events.jsonl        resumed runs, lost engines, and sizes that measured peaks corrected
    tool_results.jsonl  the results of functions that the policy called, which a resumed run uses again; each rank has its file

pandas (`read_json(path, lines=True)`) and polars (`read_ndjson(path, infer_schema_length=None)`) read these files. A file of
64 MiB is renamed to `rollouts.00001.jsonl`, and so on, before the lines of the next rollout are written, so the order of names
is the order of lines. Each line is one append, so a kill between lines leaves only complete ones. Linux can end even one write
early when it kills a process (seen with lines of 100 kB, never with 4 kB): `read_rows` skips such an incomplete last line, and
a resumed run removes it. NaN and infinities become null, because JSON has neither.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowpeak.checkpoint import fsync_path, open_without_symlink
from lowpeak.errors import CheckpointError

RUN = "run"
STEPS = "steps"
ROLLOUTS = "rollouts"
TOKENS = "tokens"
EVALUATIONS = "evaluations"
EVENTS = "events"
TOOL_RESULTS = "tool_results"
FORMAT = 2  # of the lines of completions

_NAMES = (RUN, STEPS, ROLLOUTS, TOKENS, EVALUATIONS, EVENTS, TOOL_RESULTS)
_FULL_FILE = 1 << 26  # bytes
_INT64 = 2**63
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

logger = logging.getLogger(__name__)


class Journal:
    """A writer of a run's files in `folder`.

    Rank 0 writes. Other ranks write their results of tools alone, as `tool_results-rank1.jsonl`, and so on. When the first line
    of a run is written, an earlier run's folder is moved to `earlier-1/` next to it, and so on, unless `resume_at` was called to
    continue its files. A full disk raises `CheckpointError`.

        journal = Journal(folder, rank)
        journal.begin_run()                                          # before anything trains
        journal.resume_at(step)                                      # only when a run is resumed
        journal.write_run(step, facts)
        journal.write_rollout(step, rows)                            # at a rollout's first step
        journal.write_step(step, metrics)
        journal.sync()                                               # before a checkpoint
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self._rank, self._writes = rank, rank == 0
        self._owns_files = False  # whether the files in `folder` are this run's
        self._written = False

    def begin_run(self) -> None:
        """Begin a run, with new files unless `resume_at` follows.

        Raises CheckpointError if another kind of file is in the place of the folder or of a file.
        """
        self._owns_files = self._written = False
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file, but the journal needs a folder there: move or remove it.")
        for path in self._files():
            if path.is_dir():
                raise CheckpointError(f"{path} is a folder, but the journal needs a file there: move or remove it.")
            os.close(open_without_symlink(path, os.O_RDONLY))

    def begin_files(self) -> None:
        """Move an earlier run's files away now, before ranks write; else the first line does."""
        with _write_errors(self.folder):
            _move_earlier_run(self.folder)
        self._owns_files = True

    def resume_at(self, step: int) -> None:
        """Continue the files after `step`: remove the lines of later steps, and an incomplete last line.

        Events and starts stay: they tell what happened, and the run may do their steps again without them. Tools' results stay, so
        that the steps get the same ones. Each file is replaced by a synced copy: a kill leaves either the old file or the new one.
        """
        if not self._writes:
            return
        with _write_errors(self.folder):
            for name in _names(self.folder):
                until = math.inf if name in (EVENTS, RUN) or name.startswith(TOOL_RESULTS) else step
                for path in reversed(journal_files(self.folder, name)):
                    if _remove_later_lines(path, until):
                        break  # steps ascend: earlier files keep all lines
        self._owns_files = True

    def write_run(self, step: int, facts: Mapping[str, Any]) -> None:
        """Append the facts of a start of the run after `step`, with the time in seconds since 1970."""
        self._append(RUN, step, [{"time": time.time(), **facts}])

    def write_step(self, step: int, row: Mapping[str, Any]) -> None:
        """Append the metrics of one optimizer step."""
        self._append(STEPS, step, [row])

    def write_rollout(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per completion, those of `completion_rows`; `step` is the rollout's first step."""
        self._append(ROLLOUTS, step, ({"format": FORMAT} | dict(row) for row in rows))

    def write_tokens(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append token values of completions; `row` of each is the index of its line among the rollout's lines."""
        self._append(TOKENS, step, rows)

    def write_evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        """Append the metrics of an evaluation after `step`."""
        self._append(EVALUATIONS, step, [row])

    def write_event(self, step: int, event: str, **details: Any) -> None:
        """Append an event after `step`, with the time in seconds since 1970."""
        self._append(EVENTS, step, [{"time": time.time(), "event": event, **details}])

    def write_tool_result(self, step: int, row: Mapping[str, Any]) -> None:
        """Append the result of a tool's call when it arrives; `step` is the rollout's first step.

        The row has `name`, `arguments`, `result` or `error`, `seconds`, and `key`, by which `read_tool_results` finds it: the
        weights' version, the rollout, a hash of the conversation so far, and the call's place in its turn.
        """
        if self._rank == 0:
            self._append(TOOL_RESULTS, step, [row])
        else:
            # Rank 0 has moved an earlier run's files before the run began.
            with _write_errors(self.folder):
                self._write_lines(f"{TOOL_RESULTS}-rank{self._rank}", step, [row])

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        # Called before a checkpoint, which must not outlive the lines of the steps before it.
        if not self._writes:
            return
        with _write_errors(self.folder):
            for path in self._files():
                fsync_path(path)

    def _files(self) -> list[Path]:
        return [path for name in _names(self.folder) for path in journal_files(self.folder, name)]

    def _append(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        if not self._writes:
            return
        with _write_errors(self.folder):
            if self._written and not self.folder.exists():
                self._warn_of_removal(step)
            if not self._owns_files:
                _move_earlier_run(self.folder)
            self._owns_files = self._written = True
            self._write_lines(name, step, rows)

    def _write_lines(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.jsonl"
        _number_full_file(path)
        with os.fdopen(open_without_symlink(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0) as file:
            for row in rows:
                _append_line(file.fileno(), {"step": step} | dict(row) | {"step": step})

    def _warn_of_removal(self, step: int) -> None:
        removed = self.folder if self.folder.parent.exists() else self.folder.parent
        lost = "lines" if removed == self.folder else "lines and checkpoints"
        logger.warning(
            "%s was removed while the run was writing to it: its %s from before step %d are lost, and the run continues in a new "
            "folder.",
            removed,
            lost,
            step,
        )


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of steps in order, without an incomplete last line; none if there is no file."""
    return list(read_rows(folder, STEPS))


def read_rows(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a name's files in order, without incomplete and damaged lines; none if there is no file."""
    for path in journal_files(folder, name):
        yield from (row for _, row in _read_lines(path))


def read_tool_results(folder: Path, after: int) -> dict[str, dict[str, Any]]:
    """Return the tools' results of rollouts that begin after step `after`, by their keys."""
    names = [name for name in _names(folder) if name.startswith(TOOL_RESULTS)]
    return {row["key"]: row for name in names for row in read_rows(folder, name) if row["step"] > after}


def journal_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a name (STEPS, ROLLOUTS, ...) in the order of their lines."""
    pattern = re.compile(rf"{name}(\.\d{{5}})?\.jsonl")
    return sorted(path for path in folder.glob(f"{name}*.jsonl") if pattern.fullmatch(path.name))


def _names(folder: Path) -> list[str]:
    """Return the names of all files, those of other ranks among them."""
    others = {re.sub(r"(\.\d{5})?\.jsonl$", "", path.name) for path in folder.glob(f"{TOOL_RESULTS}-rank*.jsonl")}
    return [*_NAMES, *sorted(others)]


def conversation_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return messages as text: a line with role and content, then indented lines with tool calls, and with their results."""
    lines = []
    for message in messages:
        content, thinking = str(message.get("content") or ""), message.get("reasoning_content")
        if message.get("role") == "tool":
            lines.append(f"  {message.get('name') or 'tool'} -> {content}".replace("\n", "\n    "))
            continue
        content = f"<think>{thinking}</think> {content}" if thinking else content
        lines.append(f"{message.get('role', '?')}: {content}".strip())
        lines += [f"  {_call_text(call)}" for call in message.get("tool_calls") or ()]
    return "\n".join(lines)


def _call_text(call: Mapping[str, Any]) -> str:
    """Return a tool call as `name(argument=value)`, with values as JSON."""
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{name}={_ENCODER.encode(_json_value(value))}" for name, value in arguments.items())
    return f"{function.get('name')}({arguments})"


def _json_value(value: Any) -> Any:
    """Return the value in types of JSON, integers of more than 64 bits as str.

    Arrays and tensors become lists, objects of other types their str.
    """
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_json_value, value))
    return _json_value(value.tolist()) if hasattr(value, "tolist") else str(value)


def _append_line(descriptor: int, row: Mapping[str, Any]) -> None:
    """Append the row in one write.

    If the line cannot be written completely, it is removed, so that the file stays readable.
    """
    # A lone surrogate, which tokenizers can produce and readers reject, becomes a question mark.
    line = _ENCODER.encode(_json_value(row)).encode("utf-8", "replace") + b"\n"
    start = os.fstat(descriptor).st_size
    written = 0
    try:
        # A write that was short is repeated only to raise its error.
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except BaseException:
        os.ftruncate(descriptor, start)
        raise


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each complete line and its row; skip incomplete and damaged lines."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and type(row.get("step")) is int:
                yield line, row
            else:
                logger.warning("%s: line %d is incomplete or damaged and is skipped.", path, number)


def _remove_later_lines(path: Path, step: float) -> bool:
    """Remove lines of later steps and damaged ones, and a file that has no others; return whether it has others."""
    copy = path.with_name(f"{path.name}.new")
    with os.fdopen(open_without_symlink(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.writelines(line for line, row in _read_lines(path) if row["step"] <= step)
        keeps_lines = file.tell() > 0
        file.flush()
        os.fsync(file.fileno())
    os.replace(copy, path)
    if not keeps_lines:
        path.unlink()
    fsync_path(path.parent)
    return keeps_lines


def _move_earlier_run(folder: Path) -> None:
    """Move an earlier run's folder into the last `earlier-K`, or a new one if that has a journal."""
    # Its checkpoints are already in that folder, if it has some.
    names = [name for name in _names(folder) if name != RUN]  # a run that took no step stays
    last_files = [files[-1] for name in names if (files := journal_files(folder, name))]
    if not last_files:
        return
    for path in last_files:
        _remove_later_lines(path, math.inf)
    found = (re.fullmatch(r"earlier-(\d+)", path.name) for path in folder.parent.iterdir())
    number = max((int(match[1]) for match in found if match), default=1)
    if (folder.parent / f"earlier-{number}" / folder.name).exists():
        number += 1
    earlier = folder.parent / f"earlier-{number}"
    earlier.mkdir(exist_ok=True)
    os.replace(folder, earlier / folder.name)


def _number_full_file(path: Path) -> None:
    """Give a full file the next number, so that a new one follows it."""
    if not os.path.lexists(path) or path.lstat().st_size < _FULL_FILE:
        return
    *numbered, _ = journal_files(path.parent, path.stem)
    number = int(numbered[-1].name.split(".")[1]) + 1 if numbered else 1
    os.replace(path, path.with_name(f"{path.stem}.{number:05}.jsonl"))


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Convert OSErrors in the block to CheckpointErrors with the remedy."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        message = f"Cannot write the journal in {folder}: {error.strerror}; earlier lines are complete"
        remedy = "Free disk space" if error.errno in _FULL else "Make the folder writable"
        raise CheckpointError(f"{message}. {remedy}, or choose another output_dir, and resume.") from error

"""The table of the self-test: its rows, their processes and their results.

Each row runs in a separate process with a time limit: a GPU error makes its process unusable, and a process cannot end its own
hang.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch

from lowpeak.errors import ArgumentError
from lowpeak.vllm import require_vllm

Size = TypeVar("Size")
Say = Callable[[str], None]

LIMIT_SECONDS = 600.0
_LOG_LINES = 15
_say = partial(print, flush=True)
_CHILD = "import sys; from lowpeak.selftest.table import run_row; run_row(*sys.argv[1:])"
_OVER = "the time limit of the self-test was reached"
_MODULES = tuple(f"lowpeak.selftest.{name}" for name in ("kernels", "engines", "runs"))

_NEEDS: dict[str, Callable[[], bool]] = {
    "a GPU": lambda: torch.cuda.device_count() >= 1,
    "2 GPUs": lambda: torch.cuda.device_count() >= 2,
    "Triton": lambda: find_spec("triton") is not None,
    "vLLM": lambda: find_spec("vllm") is not None,
    "DeepSpeed": lambda: find_spec("deepspeed") is not None,
}


class MismatchError(Exception):
    """The error of a row whose numbers are out of tolerance."""


@dataclass(frozen=True)
class Bench:
    """The device and the empty folder that a row uses."""

    device: torch.device
    folder: Path

    def pick(self, on_gpu: Size, on_cpu: Size) -> Size:
        """Return the size for a GPU, or the small size with which the row runs on a CPU."""
        return on_gpu if self.device.type == "cuda" else on_cpu


@dataclass(frozen=True)
class Row:
    """A row of the table: `run` returns its numbers as text or raises; `needs` are names of `_NEEDS`."""

    name: str
    run: Callable[[Bench], str]
    needs: tuple[str, ...]
    seconds: float

    @property
    def module(self) -> str:
        return str(getattr(self.run, "func", self.run).__module__)

    def missing_need(self) -> str | None:
        """Return the first of the row's needs that this machine lacks, or None."""
        return next((need for need in self.needs if not _NEEDS[need]()), None)


@dataclass(frozen=True)
class Outcome:
    """The result of a row ("ok", "FAILED" or "not run"), its numbers or the reason, and a failed row's last output."""

    result: str
    numbers: str
    log: str = ""


_ROWS: dict[str, Row] = {}


def row(name: str, *needs: str, seconds: float = 60.0) -> Callable[[Callable[[Bench], str]], Callable[[Bench], str]]:
    """Register a function as the row `name` with a time limit of `seconds`."""

    def register(run: Callable[[Bench], str]) -> Callable[[Bench], str]:
        _ROWS[name] = Row(name, run, needs, seconds)
        return run

    return register


def all_rows() -> list[Row]:
    """Return all rows in the order of the table."""
    for module in _MODULES:
        importlib.import_module(module)
    return [each for module in _MODULES for each in _ROWS.values() if each.module == module]


def choose_rows(gpu: bool) -> tuple[list[Row], str]:
    """Return all rows (`gpu`) or those of vLLM, with their device; an error if the machine lacks a GPU or vLLM."""
    if not gpu:
        require_vllm("lowpeak env --selftest")
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
        return [each for each in all_rows() if "vLLM" in each.needs], device
    if not torch.cuda.is_available():
        raise ArgumentError(
            "`lowpeak env --selftest --gpu` needs a GPU, but torch finds none (`lowpeak env` shows how torch was built): run it on "
            "a machine with a GPU, or remove --gpu to test only vLLM."
        )
    return all_rows(), "cuda:0"


def require(condition: bool, message: str) -> None:
    """Raise MismatchError with `message` unless the condition holds."""
    if not condition:
        raise MismatchError(message)


def run_rows(rows: Sequence[Row], device: str, say: Say = _say, limit: float = LIMIT_SECONDS) -> bool:
    """Run rows in order and print their table as Markdown; return whether none failed.

    Rows that would start after `limit` seconds are not run.
    """
    began = time.monotonic()
    say("| row | result | numbers |\n|---|---|---|")
    outcomes = []
    for each in rows:
        outcomes.append(_run(each, device, began + limit - time.monotonic()))
        say(f"| {each.name} | {outcomes[-1].result} | {' '.join(outcomes[-1].numbers.replace('|', '/').split())} |")
    counts = [sum(outcome.result == kind for outcome in outcomes) for kind in ("ok", "FAILED", "not run")]
    say(f"\n{counts[0]} ok, {counts[1]} failed, {counts[2]} not run, in {time.monotonic() - began:.0f} s")
    for each, outcome in zip(rows, outcomes, strict=True):
        if outcome.log:
            say(f"\nlast output of {each.name}:\n{outcome.log}")
    return counts[1] == 0


def _run(each: Row, device: str, seconds_left: float) -> Outcome:
    missing = each.missing_need()
    if missing is not None:
        return Outcome("not run", f"needs {missing}")
    if seconds_left <= 0:
        return Outcome("not run", _OVER)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lowpeak-selftest-", ignore_cleanup_errors=True) as folder:
        log = Path(folder, "output.txt")
        status = _run_process(each, device, log, max(0.0, min(each.seconds, seconds_left)))
        if status is None and seconds_left < each.seconds:
            return Outcome("not run", _OVER)
        outcome = _outcome(status, log)
    return Outcome(outcome.result, f"{outcome.numbers}; {time.monotonic() - began:.0f} s", outcome.log)


def _run_process(each: Row, device: str, log: Path, limit: float) -> int | None:
    """Run the row's process, then kill its session; return its exit status, None after `limit` seconds."""
    command = [sys.executable, "-c", _CHILD, each.module, each.name, device, str(log.parent)]
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _outcome(status: int | None, log: Path) -> Outcome:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    end = "\n".join(lines[-_LOG_LINES:])
    if status is None:
        return Outcome("FAILED", "did not end in its time", end)
    if status < 0:
        return Outcome("FAILED", f"ended by {signal.Signals(-status).name}", end)
    answer = log.with_name("result.json")
    if not answer.exists():
        return Outcome("FAILED", f"ended with status {status}: {lines[-1] if lines else 'no output'}", end)
    result, numbers = json.loads(answer.read_text(encoding="utf-8"))
    return Outcome(result, numbers, end if result == "FAILED" else "")


def run_row(module: str, name: str, device: str, folder: str) -> None:
    """Run one row in this process and write its result into the folder."""
    importlib.import_module(module)
    try:
        result = ("ok", _ROWS[name].run(Bench(torch.device(device), Path(folder))))
    except Exception as error:
        traceback.print_exc()
        message = next(iter(str(error).strip().splitlines()), "no message")
        result = ("FAILED", message if isinstance(error, MismatchError) else f"{type(error).__name__}: {message}")
    Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")

"""The table of the self-test: its rows, their processes and their results.

Each row runs in a separate process with a time limit: a GPU error makes its process unusable, and a process cannot end its own
hang.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from lowpeak.errors import ArgumentError
from lowpeak.vllm import require_vllm

Size = TypeVar("Size")
Say = Callable[[str], None]

LIMIT_SECONDS = 600.0
QUICK_SECONDS = 180.0
_ROW_SHARE = 2 / 3  # of the limit of all rows, for one of them: a row that hangs fails before the limit ends
_LOG_LINES = 15
_say = partial(print, flush=True)
_CHILD = "import sys; from lowpeak.selftest.table import run_row; run_row(*sys.argv[1:])"
_LIMIT_REACHED = "the time limit of the self-test was reached"
GROUPS = ("kernels", "memory", "decode", "vllm", "oom", "training", "offload", "ranks")
_MODULES = tuple(f"lowpeak.selftest.{group}" for group in GROUPS)

_NEEDS: dict[str, Callable[[], bool]] = {
    "a GPU": lambda: torch.cuda.device_count() >= 1,
    "2 GPUs": lambda: torch.cuda.device_count() >= 2,
    "Triton": lambda: find_spec("triton") is not None,
    "vLLM": lambda: find_spec("vllm") is not None,
    "DeepSpeed": lambda: find_spec("deepspeed") is not None,
    "peft": lambda: find_spec("peft") is not None,
    "bitsandbytes": lambda: find_spec("bitsandbytes") is not None,
}


class MismatchError(Exception):
    """The error of a row whose numbers are out of tolerance."""


@dataclass(frozen=True)
class Bench:
    """The device and the empty folder that a row uses, and the numbers that it measures; `quick` asks for short sizes."""

    device: torch.device
    folder: Path
    quick: bool = False
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, on_gpu: Size, on_cpu: Size) -> Size:
        """Return the size for a GPU, or the small size with which the row runs on a CPU."""
        return on_gpu if self.on_gpu else on_cpu

    def record(self, **numbers: Any) -> None:
        """Add numbers to the row's result; those of a row that fails later are kept."""
        self.numbers.update(numbers)


@dataclass(frozen=True)
class Row:
    """A row of the table: `run` returns its numbers as text or raises; `needs` are names of `_NEEDS`.

    `quick` rows run under --quick; rows that are not `in_default_run` run only by their name or group.
    """

    name: str
    run: Callable[[Bench], str]
    needs: tuple[str, ...]
    seconds: float
    quick: bool = False
    in_default_run: bool = True

    @property
    def module(self) -> str:
        return str(getattr(self.run, "func", self.run).__module__)

    @property
    def group(self) -> str:
        return self.module.rpartition(".")[2]

    def missing_need(self) -> str | None:
        """Return the first of the row's needs that this machine lacks, or None."""
        return next((need for need in self.needs if not _NEEDS[need]()), None)


@dataclass(frozen=True)
class Outcome:
    """The result of a row ("ok", "FAILED", "not run"), its text or reason, and a failed row's output."""

    result: str
    text: str
    log: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def cell(self) -> str:
        """The text in a cell of a Markdown table, with seconds if the row ran."""
        seconds = "" if self.result == "not run" else f"; {self.seconds:.0f} s"
        return " ".join(self.text.replace("|", "/").split()) + seconds


_ROWS: dict[str, Row] = {}


def row(
    name: str, *needs: str, seconds: float = 60.0, quick: bool = False, in_default_run: bool = True
) -> Callable[[Callable[[Bench], str]], Callable[[Bench], str]]:
    """Register a function as the row `name` with a time limit of `seconds`; see Row."""

    def register(run: Callable[[Bench], str]) -> Callable[[Bench], str]:
        _ROWS[name] = Row(name, run, needs, seconds, quick, in_default_run)
        return run

    return register


def all_rows() -> list[Row]:
    """Return all rows in the order of the table."""
    for module in _MODULES:
        importlib.import_module(module)
    return [each for module in _MODULES for each in _ROWS.values() if each.module == module]


@dataclass(frozen=True)
class Selection:
    """Rows to run on a device within `limit` seconds in total, in short sizes if `quick`."""

    rows: list[Row]
    device: str
    limit: float = LIMIT_SECONDS
    quick: bool = False


def choose_rows(gpu: bool, names: Sequence[str] = (), quick: bool = False) -> Selection:
    """Return the rows of `names` (groups and rows), the quick rows, or the in_default_run rows: of vLLM alone unless `gpu`.

    Rows that are chosen by name have no common limit. ArgumentError for an unknown name and, with `gpu`, without a GPU.
    """
    if gpu and not torch.cuda.is_available():
        raise ArgumentError(
            "`lowpeak env --selftest --gpu` needs a GPU, but torch finds none (`lowpeak env` shows how torch was built): run it on "
            "a machine with a GPU, or remove --gpu to test only vLLM."
        )
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if names:
        return Selection(_named_rows(names), device, math.inf)
    rows = all_rows()
    if not gpu:
        require_vllm("lowpeak env --selftest")
        rows = [each for each in rows if "vLLM" in each.needs]
    if quick:
        return Selection([each for each in rows if each.quick], device, QUICK_SECONDS, quick=True)
    return Selection([each for each in rows if each.in_default_run], device)


def _named_rows(names: Sequence[str]) -> list[Row]:
    rows = all_rows()
    known = {*GROUPS, *(each.name for each in rows)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ArgumentError(
            f"--rows has {unknown[0]!r}, which is no group ({', '.join(GROUPS)}) and no row "
            f"({', '.join(each.name for each in rows)})."
        )
    return [each for each in rows if {each.group, each.name} & {*names}]


def require(condition: bool, message: str) -> None:
    """Raise MismatchError with `message` unless the condition holds."""
    if not condition:
        raise MismatchError(message)


def run_rows(selection: Selection, say: Say = _say) -> list[Outcome]:
    """Run rows in order, print their table as Markdown, and return their outcomes.

    Rows that would start after the selection's limit are not run.
    """
    began = time.monotonic()
    say("| row | result | numbers |\n|---|---|---|")
    outcomes = []
    for each in selection.rows:
        outcomes.append(_run(each, selection, began + selection.limit - time.monotonic()))
        say(f"| {each.name} | {outcomes[-1].result} | {outcomes[-1].cell} |")
    counts = [sum(outcome.result == kind for outcome in outcomes) for kind in ("ok", "FAILED", "not run")]
    say(f"\n{counts[0]} ok, {counts[1]} failed, {counts[2]} not run, in {time.monotonic() - began:.0f} s")
    for each, outcome in zip(selection.rows, outcomes, strict=True):
        if outcome.log:
            say(f"\nlast output of {each.name}:\n{outcome.log}")
    return outcomes


def to_json(environment: Mapping[str, str], selection: Selection, outcomes: Sequence[Outcome]) -> str:
    """Return one JSON document: the environment, and each row with its result, text, numbers, seconds and last output."""
    rows = [
        {
            "row": each.name,
            "group": each.group,
            "result": outcome.result,
            "text": outcome.text,
            "numbers": outcome.numbers,
            "seconds": round(outcome.seconds, 1),
            "last_output": outcome.log,
        }
        for each, outcome in zip(selection.rows, outcomes, strict=True)
    ]
    started = {"date": date.today().isoformat(), "device": selection.device, "quick": selection.quick}
    document = {"environment": environment, **started, "rows": rows}
    return json.dumps(document, indent=2)


def _run(each: Row, selection: Selection, seconds_left: float) -> Outcome:
    missing = each.missing_need()
    if missing is not None:
        return Outcome("not run", f"needs {missing}")
    if seconds_left <= 0:
        return Outcome("not run", _LIMIT_REACHED)
    limit = min(each.seconds, _ROW_SHARE * selection.limit)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lowpeak-selftest-", ignore_cleanup_errors=True) as folder:
        log = Path(folder, "output.txt")
        status = _run_process(each, selection, log, min(limit, seconds_left))
        if status is None and seconds_left < limit:
            return Outcome("not run", _LIMIT_REACHED)
        return replace(_outcome(status, log), seconds=time.monotonic() - began)


def _run_process(each: Row, selection: Selection, log: Path, limit: float) -> int | None:
    """Run the row's process, then kill its session; return its exit status, None after `limit` seconds."""
    speed = "quick" if selection.quick else "full"
    command = [sys.executable, "-c", _CHILD, each.module, each.name, selection.device, str(log.parent), speed]
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
    result, text, numbers = json.loads(answer.read_text(encoding="utf-8"))
    return Outcome(result, text, end if result == "FAILED" else "", numbers)


def run_row(module: str, name: str, device: str, folder: str, speed: str) -> None:
    """Run one row in this process and write its result into the folder."""
    importlib.import_module(module)
    bench = Bench(torch.device(device), Path(folder), quick=speed == "quick")
    try:
        result = ("ok", _ROWS[name].run(bench))
    except Exception as error:
        traceback.print_exc()
        message = next(iter(str(error).strip().splitlines()), "no message")
        result = ("FAILED", message if isinstance(error, MismatchError) else f"{type(error).__name__}: {message}")
    numbers = {key: _to_json_value(value) for key, value in bench.numbers.items()}
    Path(folder, "result.json").write_text(json.dumps([*result, numbers]), encoding="utf-8")


def _to_json_value(value: Any) -> Any:
    """Return a value that JSON has: NaN and infinities, which it lacks, become text."""
    if isinstance(value, Mapping):
        return {key: _to_json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

"""Results of checks as lines, and errors of a user's code as one sentence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lowpeak.errors import ArgumentError, LowpeakError, fail_on_exit, first_line, line_in_files

TINY_RUN: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


@dataclass(frozen=True)
class Check:
    """The result of one check: a measurement, or why it failed and the remedy."""

    name: str
    passed: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.name}: {self.text}"


def run_check(name: str, run: Callable[[], str], files: Callable[[], Collection[str]]) -> Check:
    """Run a check that returns its text; an error fails it, explained with the `files` of the user's code."""
    try:
        with fail_on_exit(ArgumentError, name):
            return Check(name, True, run())
    except Exception as error:
        return Check(name, False, explain(error, files()))


def explain(error: BaseException, files: Collection[str]) -> str:
    """Return an error as one sentence; unless it is lowpeak's own, with the last line of `files` in its traceback."""
    if isinstance(error, LowpeakError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}{line_in_files(error, files)}"

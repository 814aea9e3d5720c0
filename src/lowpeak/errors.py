"""Errors that users meet, and text for error messages.

Each class is also the built-in error that it refines. A message names the subject, the value, the reason and the remedy.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}
# Unicode's bidirectional overrides and isolates: a terminal shows the text after them in another order.
_DIRECTIONS = {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def show_controls(text: str) -> str:
    r"""Return text with its control characters, except line ends and tabs, escaped as \x1b or \u202e.

    Models and servers may write them, and a terminal would obey.
    """
    return text.translate(_CONTROLS | _DIRECTIONS)


def shorten_names(names: Iterable[str], most: int = 3) -> str:
    """Return the first names and the number of the others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def closest_name(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the known name that differs by few letters; empty if there is none."""
    return "".join(f"did you mean {close!r}?" for close in get_close_matches(name, list(known), n=1, cutoff=0.81))


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's message, without its full stop.

    If that line ends in a colon, the next one is added. Without a message it is the name of the class.
    """
    lines = [line.strip() for line in str(error or "").strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")


def line_in_files(error: BaseException, files: Collection[str]) -> str:
    """Return the file and number of the last line of `files` in an error's traceback, as " (FILE, line N)"; "" without one."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename in files]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def files_of(*objects: object) -> set[str]:
    """Return the files of the modules that define these functions and classes."""
    modules = (sys.modules.get(getattr(each, "__module__", "")) for each in objects)
    return {getattr(module, "__file__", None) or "" for module in modules} - {""}


class LowpeakError(Exception):
    """The base class of lowpeak's errors; `rank` is the rank that failed, if it is another one."""

    rank: int | None = None

    def __str__(self) -> str:
        return show_controls(super().__str__())


class ArgumentError(LowpeakError, ValueError):
    """An argument is unknown, out of range, contradicts another, or has no effect in the run."""


class DataError(LowpeakError, ValueError):
    """A dataset, or one of its rows or prompts, cannot be used."""


class ModelError(LowpeakError, ValueError):
    """A model or tokenizer cannot be found, loaded or used."""


class HeadMismatchError(ModelError):
    """The log-prob core and the model's logits disagree at start-up."""


class RewardError(LowpeakError, RuntimeError):
    """A reward function failed, or did not return one float or None per completion."""


class RewardTimeoutError(RewardError, TimeoutError):
    """A reward function did not return within its time limit."""


class EngineError(LowpeakError, RuntimeError):
    """A rollout engine or a `rollout_func` failed, or its result cannot be used."""


class LostEngineError(EngineError):
    """An engine is gone, restarted, or dropped its requests, so its weights must be sent again.

    `finished` are the completions that it returned before, by their requests' index in the wave.
    """

    finished: Mapping[int, Any] = {}


class StoppedError(LowpeakError, InterruptedError):
    """A wait was aborted because the run was asked to stop; work done before it is kept."""


class NonFiniteError(LowpeakError, FloatingPointError):
    """A loss, log-prob or gradient is NaN or infinite. Raised before the optimizer step."""


class CheckpointError(LowpeakError, OSError):
    """A checkpoint cannot be written, read or resumed from."""


class RankError(LowpeakError, RuntimeError):
    """Another rank is gone, does not answer, or failed with an error that is not lowpeak's."""


class MemoryExhaustedError(LowpeakError, MemoryError):
    """A phase ran out of memory. Users catch this class; its subclasses are for ranks that try again together.

    reason          the cause, without the remedy that the message has
    is_resumable    all ranks tried the smallest sizes: the state before the step can be saved
    """

    def __init__(self, message: str, reason: str = "", *, is_resumable: bool = False) -> None:
        super().__init__(message)
        self.reason, self.is_resumable = show_controls(reason or message), is_resumable


class LocalMemoryError(MemoryExhaustedError):
    """Memory ran out on this rank alone; it still reaches the next agreement, so the watchdog must not end the run."""


class AgreedMemoryError(MemoryExhaustedError):
    """Memory ran out on a rank. All ranks raise this at the same call, so they can try again."""


class MissingPackageError(LowpeakError, ImportError):
    """An optional package that the arguments need is not installed."""


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it.

    A folder of that name on `sys.path` (a namespace package) does not count.
    """
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def require_package(package: str, what: str, extra: str, otherwise: str = "", named: str = "") -> None:
    """Raise MissingPackageError if `package`, which `what` needs, is not installed.

    `extra` is lowpeak's extra that installs it, `named` the package's name for users, `otherwise` another remedy.
    """
    if not is_installed(package):
        raise MissingPackageError(
            f"{what} needs {named or package}, which is not installed: in lowpeak's checkout run "
            f"pip install '.[{extra}]'{otherwise}."
        )


@contextmanager
def fail_on_exit(kind: type[LowpeakError], function: str) -> Iterator[None]:
    """Raise `kind` if the user's function that the block calls ends in SystemExit.

    Otherwise the run would end as if it had succeeded.
    """
    try:
        yield
    except SystemExit as stop:
        raise kind(
            f"{function} called sys.exit({'' if stop.code is None else repr(stop.code)}), which would end the run without saving. "
            "Raise an error with the reason instead."
        ) from stop

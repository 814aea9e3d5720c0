"""Errors a user can meet: each says what is wrong, where, and what to do, and is also the stdlib error it refines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}
# Overrides and isolates of the direction of writing: they show what follows in another order than it has.
_DIRECTIONS = {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def show_controls(text: str) -> str:
    r"""Return text with control characters other than line ends and tabs written out, as \x1b or \u202e.

    A terminal would obey them, and models and servers write them.
    """
    return text.translate(_CONTROLS | _DIRECTIONS)


def first_line(error: BaseException | None) -> str:
    """Return the first line of what an error says, without its full stop, and the next where it ends in a colon.

    An error that says nothing is the name of its class.
    """
    lines = [line.strip() for line in str(error or "").strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")


class LowpeakError(Exception):
    """Base of every error that lowpeak raises on purpose; `rank` is the rank that failed, where it is another one."""

    rank: int | None = None

    def __str__(self) -> str:
        return show_controls(super().__str__())


class ArgumentError(LowpeakError, ValueError):
    """An argument is unknown, out of range, contradicts another, or has no effect in the resolved run."""


class DataError(LowpeakError, ValueError):
    """A data set, a row or a prompt cannot be used."""


class ModelError(LowpeakError, ValueError):
    """A model or tokenizer cannot be found, loaded or used."""


class HeadMismatchError(ModelError):
    """The log-prob core and the model's own logits disagree at start-up."""


class RewardError(LowpeakError, RuntimeError):
    """A reward function failed or returned something that is not one float or None per completion."""


class RewardTimeoutError(RewardError, TimeoutError):
    """A reward function did not return within its time limit."""


class EngineError(LowpeakError, RuntimeError):
    """A rollout engine or a `rollout_func` returned something that cannot be used."""


class LostEngineError(EngineError):
    """An engine is gone, was restarted, or gave its requests up: it holds no known weights and must be loaded again.

    `finished` are the answers that came before, by the place of their requests in the wave.
    """

    finished: Mapping[int, Any] = {}


class StoppedError(LowpeakError, InterruptedError):
    """A wait was given up because the run was asked to stop; what was done before it stands."""


class NonFiniteError(LowpeakError, FloatingPointError):
    """A loss, log-prob or gradient is NaN or infinite; raised before the optimizer step."""


class CheckpointError(LowpeakError, OSError):
    """A checkpoint cannot be written, read or resumed from."""


class RankError(LowpeakError, RuntimeError):
    """Another rank of the run is gone, does not answer, or failed with an error that is not lowpeak's."""


class MemoryExhaustedError(LowpeakError, MemoryError):
    """A phase took more memory than there is."""


class MissingPackageError(LowpeakError, ImportError):
    """An optional package is needed for what was asked."""


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it; a folder of that name on the path is none."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def require_package(package: str, what: str, extra: str, otherwise: str = "", named: str = "") -> None:
    """Raise MissingPackageError where a package that `what` needs is not installed; `extra` is that of lowpeak that has it."""
    if not is_installed(package):
        raise MissingPackageError(
            f"{what} needs {named or package}, which is not installed: pip install 'lowpeak[{extra}]'{otherwise}."
        )


@contextmanager
def fail_on_exit(kind: type[LowpeakError], function: str) -> Iterator[None]:
    """Raise `kind` if the user's function that the block calls ends in SystemExit: the run would end as if it had succeeded."""
    try:
        yield
    except SystemExit as stop:
        raise kind(
            f"{function} called sys.exit({'' if stop.code is None else repr(stop.code)}), which would end the run without a save: "
            "raise an error that says why instead."
        ) from stop

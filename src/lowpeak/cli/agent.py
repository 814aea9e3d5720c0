"""accelerate's launcher inside this process: ranks are started and waited for, Ctrl-C goes through, and one sentence says
which rank ended the run.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lowpeak.errors import ArgumentError, LowpeakError

_USER_ERROR = 2  # a rank's exit status after a sentence to the user
_HANDLED = "SIGTERM,SIGHUP,SIGQUIT"  # what torch's agent ends the ranks on; Ctrl-C is ours


def run_agent(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Call `accelerate launch` with these words, and return the run's exit status: 0, that of the rank that failed first, 128 +
    the signal that ended it, or 130 after Ctrl-C.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = launch_command_parser().parse_args(list(words))
    with _surroundings(environ), _CtrlC() as ctrl_c:
        try:
            launch_command(args)
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            return 130 if ctrl_c.presses else _told(rank, failure.exitcode)
        except SignalException as ended:
            return 128 + int(ended.sigval)
        except LowpeakError:
            raise
        except (AssertionError, OSError, OverflowError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0] or f"{type(error).__name__} of accelerate's launcher"
            raise ArgumentError(f"the processes cannot be started: {reason}") from error
    return 130 if ctrl_c.presses else 0


def _told(rank: int, code: int) -> int:
    """The exit status for a rank's; a rank that could not say itself why it ended is named."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (which the system does when the host's memory is full)" if name == "SIGKILL" else ""
        print(f"lowpeak: error: rank {rank} was ended by {name}{hint}, and the run with it.", file=sys.stderr)
        return 128 - code
    if code != _USER_ERROR:
        print(f"lowpeak: error: rank {rank} ended with status {code}; what it said stands above.", file=sys.stderr)
    return code


@contextmanager
def _surroundings(environ: Mapping[str, str]) -> Iterator[None]:
    """The ranks' environment; torch's agent is quiet, since ranks speak for themselves (LOWPEAK_TRACEBACK=1 lets it talk)."""
    os.environ.update(environ)
    os.environ.update(PET_SIGNALS_TO_HANDLE=_HANDLED, TORCHELASTIC_SIGNALS_TO_HANDLE=_HANDLED)
    agent = logging.getLogger("torch.distributed.elastic")
    before = agent.level
    if os.environ.get("LOWPEAK_TRACEBACK", "0") in ("", "0"):
        agent.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        agent.setLevel(before)
        for name in environ:
            os.environ.pop(name, None)  # this process is no rank


class _CtrlC:
    """While ranks run: the first Ctrl-C is passed on to them, who finish their step and save; the second ends them now.

    They are in sessions of their own, so a terminal does not reach them.
    """

    def __init__(self) -> None:
        self.presses = 0
        self._before: Any = None

    def __enter__(self) -> _CtrlC:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, signum: int, frame: FrameType | None) -> None:
        import psutil  # type: ignore[import-untyped]
        from torch.distributed.elastic.multiprocessing.api import SignalException

        self.presses += 1
        ranks = psutil.Process().children()
        if self.presses > 1 or not ranks:
            raise SignalException("interrupted", signal.SIGINT)
        for rank in ranks:
            rank.send_signal(signal.SIGINT)

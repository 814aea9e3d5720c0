"""Servers and a trainer under way: a dead server is started again, signals are passed on, and what ends one ends all."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lowpeak.cli.output import tell
from lowpeak.cli.serve import Signals
from lowpeak.errors import EngineError
from lowpeak.vllm.serving import Server, ServerProcess, words
from lowpeak.watchdog import PARENT

_RESTARTS = 3  # in a row, of a server that did not last
_LASTING_SECONDS = 600.0
_FAILED_STARTS = 2  # in a row: a device's memory may not have been free yet the first time
_POLL_SECONDS = 0.3
_STOP_SECONDS = 15.0
_SAVE_SECONDS = 60.0  # for a trainer without a server: it gives up waiting, and saves


@dataclass(frozen=True)
class ServersAndTrainer:
    """What to start: the servers, and the trainer's command with what its environment has beside this process's."""

    servers: tuple[Server, ...]
    command: tuple[str, ...]
    trainer_environ: Mapping[str, str]
    logs: Path


@dataclass
class _Watched:
    """A server, since when it is ready, and how often in a row it did not last, or did not even start."""

    process: ServerProcess
    ready_since: float | None = None
    was_ready: bool = False
    restarts: int = 0
    failed_starts: int = 0

    def look_after(self) -> None:
        """Start the server again if it died after it had been ready; EngineError if it never was, or dies again and again."""
        process, status = self.process, self.process.status()
        if status is None:
            if self.ready_since is None and process.is_ready():
                self.ready_since, self.was_ready, self.failed_starts = time.monotonic(), True, 0
                tell(f"lowpeak: vLLM at {process.server.url} is ready")
            return
        if self.ready_since is None:
            self.failed_starts += 1
        elif time.monotonic() - self.ready_since > _LASTING_SECONDS:
            self.restarts = 0
        self.ready_since = None
        end = process.describe_end(status)
        if not self.was_ready or self.failed_starts >= _FAILED_STARTS or self.restarts >= _RESTARTS:
            raise EngineError(f"(after {self.restarts} restarts) {end}" if self.restarts else end)
        self.restarts += 1
        process.start()
        tell(f"lowpeak: {end}\nlowpeak: vLLM at {process.server.url} is started again (process {process.pid})")


def supervise(
    both: ServersAndTrainer, environ: Mapping[str, str], command: Callable[[Server], list[str]] = words
) -> int:
    """Run servers and trainer until the trainer ends, and return its exit status; EngineError if a server cannot be had.

    `command` makes a server's command line.
    """
    servers = [
        _Watched(ServerProcess(each, environ, both.logs / f"vllm-{number}.log", command))
        for number, each in enumerate(both.servers)
    ]
    trainer: subprocess.Popen[bytes] | None = None
    grace = 1.0
    with Signals() as signals:
        try:
            for each in servers:
                each.process.start()
                server = each.process.server
                where = f"{','.join(server.devices)} at {server.url}"
                tell(f"lowpeak: vLLM starts on {where} (process {each.process.pid}), log in {each.process.log}")
            trainer_environ = {**environ, **both.trainer_environ, PARENT: str(os.getpid())}
            trainer = subprocess.Popen(both.command, env=trainer_environ, start_new_session=True)
            status = _wait(trainer, servers, signals)
        except EngineError:
            tell("lowpeak: no vLLM server available; saving and stopping")
            grace = _SAVE_SECONDS
            raise
        finally:
            if trainer is not None:
                _end(trainer, grace)
            for each in servers:
                each.process.stop()
    return 128 - status if status < 0 else status


def _wait(trainer: subprocess.Popen[bytes], servers: Sequence[_Watched], signals: Signals) -> int:
    """Wait for the trainer's end: pass on the signals that this process gets, and keep the servers running."""
    passed, asked_at = 0, 0.0
    while trainer.poll() is None:
        if signals.count > passed:
            passed += 1
            asked_at = time.monotonic()
            trainer.send_signal(signal.SIGINT if signals.last == signal.SIGINT else signal.SIGTERM)
        if passed > 1 and time.monotonic() - asked_at > _STOP_SECONDS:
            break
        for each in servers:
            each.look_after()
        time.sleep(_POLL_SECONDS)
    return trainer.returncode if trainer.returncode is not None else -signal.SIGKILL


def _end(trainer: subprocess.Popen[bytes], grace: float) -> None:
    """End the trainer if it has not ended: asked, asked again after `grace` seconds, killed. Ranks end with their launcher.

    SIGTERM asks a run to finish its step, and a launcher to end its ranks; Ctrl-C after it stops a run at once.
    """
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGINT, _STOP_SECONDS)):
        if trainer.poll() is None:
            trainer.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                trainer.wait(seconds)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(trainer.pid, signal.SIGKILL)
    trainer.wait()

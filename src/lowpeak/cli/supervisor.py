"""Servers and a trainer under way: a server that has died is started again, signals are passed on, and what ends one ends all."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lowpeak.cli.serve import Signals
from lowpeak.cli.tell import tell
from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.command import Server, words
from lowpeak.rollout.vllm.process import ServerProcess
from lowpeak.watch.orphans import PARENT

_RESTARTS = 3  # in a row, of a server that did not last
_LASTING_SECONDS = 600.0
_FAILED_STARTS = 2  # in a row: a device's memory may not have been free yet the first time
_POLL_SECONDS = 0.3
_STOP_SECONDS = 15.0
_SAVE_SECONDS = 60.0  # for a trainer whose server cannot be had: it gives up waiting, and saves


@dataclass
class _Lives:
    """How a server has fared: since when it is ready, and how often in a row it did not last, or did not even start."""

    ready_since: float | None = None
    was_ready: bool = False
    restarts: int = 0
    failed_starts: int = 0

    def note_ready(self) -> None:
        """It answers."""
        self.ready_since, self.was_ready, self.failed_starts = time.monotonic(), True, 0

    def note_end(self) -> None:
        """It has died."""
        if self.ready_since is None:
            self.failed_starts += 1
        elif time.monotonic() - self.ready_since > _LASTING_SECONDS:
            self.restarts = 0
        self.ready_since = None
        self.restarts += 1

    @property
    def is_hopeless(self) -> bool:
        """Whether another start would end like the last ones."""
        return not self.was_ready or self.failed_starts >= _FAILED_STARTS or self.restarts > _RESTARTS


@dataclass(frozen=True)
class ServersAndTrainer:
    """What to start: the servers, and the trainer's command with what its environment has beside this process's."""

    servers: tuple[Server, ...]
    command: tuple[str, ...]
    trainer_environ: Mapping[str, str]
    logs: Path


class Supervisor:
    """Servers and a trainer under way; `command` makes a server's command line."""

    def __init__(
        self, both: ServersAndTrainer, environ: Mapping[str, str], command: Callable[[Server], list[str]] = words
    ) -> None:
        self._servers = [
            ServerProcess(each, environ, both.logs / f"vllm-{number}.log", command)
            for number, each in enumerate(both.servers)
        ]
        self._both = both
        self._environ = environ
        self._lives = [_Lives() for _ in both.servers]

    def run(self) -> int:
        """The trainer's exit status; EngineError where a server cannot be had."""
        trainer: subprocess.Popen[bytes] | None = None
        grace = 1.0
        with Signals() as signals:
            try:
                for each in self._servers:
                    each.start()
                    where = f"{','.join(each.server.devices)} at {each.server.url}"
                    tell(f"lowpeak: vLLM starts on {where} (process {each.pid}), log in {each.log}")
                trainer = self._start_trainer()
                status = self._watch(trainer, signals)
            except EngineError:
                tell("lowpeak: a vLLM server cannot be had; the run is asked to save and to stop")
                grace = _SAVE_SECONDS
                raise
            finally:
                if trainer is not None:
                    _end(trainer, grace)
                for each in self._servers:
                    each.stop()
        return 128 - status if status < 0 else status

    def _start_trainer(self) -> subprocess.Popen[bytes]:
        environ = {**self._environ, **self._both.trainer_environ, PARENT: str(os.getpid())}
        return subprocess.Popen(self._both.command, env=environ, start_new_session=True)

    def _watch(self, trainer: subprocess.Popen[bytes], signals: Signals) -> int:
        """Wait for the trainer's end: pass on what this process is told, and keep the servers running."""
        passed, asked_at = 0, 0.0
        while trainer.poll() is None:
            if signals.count > passed:
                passed += 1
                asked_at = time.monotonic()
                trainer.send_signal(signal.SIGINT if signals.last == signal.SIGINT else signal.SIGTERM)
            if passed > 1 and time.monotonic() - asked_at > _STOP_SECONDS:
                break
            for number in range(len(self._servers)):
                self._look_after(number)
            time.sleep(_POLL_SECONDS)
        return trainer.returncode if trainer.returncode is not None else -signal.SIGKILL

    def _look_after(self, number: int) -> None:
        """Start a server again that died after it had been ready; EngineError where it never was, or dies again and again."""
        server, lives = self._servers[number], self._lives[number]
        status = server.status()
        if status is None:
            if lives.ready_since is None and server.is_ready():
                lives.note_ready()
                tell(f"lowpeak: vLLM at {server.server.url} is ready")
            return
        lives.note_end()
        said = server.told_of_end(status)
        if lives.is_hopeless:
            again = f"(after {lives.restarts - 1} restarts) " if lives.restarts > 1 else ""
            raise EngineError(f"{again}{said}")
        server.start()
        tell(f"lowpeak: {said}\nlowpeak: vLLM at {server.server.url} is started again (process {server.pid})")


def _end(trainer: subprocess.Popen[bytes], grace: float) -> None:
    """End the trainer and its ranks, where they have not ended: asked, asked again after `grace` seconds, killed.

    SIGTERM asks a run to finish its step, and a launcher to end its ranks; Ctrl-C after it stops a run at once.
    """
    import psutil  # type: ignore[import-untyped]

    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGINT, _STOP_SECONDS)):
        if trainer.poll() is None:
            trainer.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                trainer.wait(seconds)
    with suppress(psutil.NoSuchProcess):
        for each in psutil.Process(trainer.pid).children(recursive=True) if trainer.poll() is None else ():
            each.kill()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(trainer.pid, signal.SIGKILL)
    trainer.wait()

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
from lowpeak.rollout.vllm.orphans import PARENT
from lowpeak.rollout.vllm.process import ServerProcess

_RESTARTS = 3
_POLL_SECONDS = 0.3
_STOP_SECONDS = 15.0


@dataclass(frozen=True)
class Both:
    """What to start: the servers, and the trainer's command with what its environment has beside this process's."""

    servers: tuple[Server, ...]
    command: tuple[str, ...]
    trainer_environ: Mapping[str, str]
    logs: Path


class UnderWay:
    """Servers and a trainer under way; `command` makes a server's command line."""

    def __init__(self, both: Both, environ: Mapping[str, str], command: Callable[[Server], list[str]] = words) -> None:
        self._servers = [
            ServerProcess(each, environ, both.logs / f"vllm-{number}.log", command)
            for number, each in enumerate(both.servers)
        ]
        self._both = both
        self._environ = environ
        self._were_ready = [False] * len(both.servers)
        self._restarts = [0] * len(both.servers)

    def run(self) -> int:
        """The trainer's exit status; EngineError where a server cannot be had."""
        trainer: subprocess.Popen[bytes] | None = None
        with Signals() as signals:
            try:
                for each in self._servers:
                    each.start()
                    where = f"{','.join(each.server.devices)} at {each.server.url}"
                    tell(f"lowpeak: vLLM starts on {where} (process {each.pid}), log in {each.log}")
                trainer = self._start_trainer()
                status = self._watch(trainer, signals)
            finally:
                if trainer is not None:
                    _end(trainer)
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
        server = self._servers[number]
        status = server.status()
        if status is None:
            if not self._were_ready[number] and server.is_ready():
                self._were_ready[number] = True
                tell(f"lowpeak: vLLM at {server.server.url} is ready")
            return
        self._restarts[number] += 1
        if not self._were_ready[number] or self._restarts[number] > _RESTARTS:
            raise EngineError(server.told_of_end(status))
        server.start()
        said = f"vLLM at {server.server.url} ended with status {status} and is started again (process {server.pid})"
        tell(f"lowpeak: {said}")


def _end(trainer: subprocess.Popen[bytes]) -> None:
    """End the trainer and its ranks, where they have not ended: asked, asked again, killed.

    SIGTERM asks a run to finish its step, and a launcher to end its ranks; Ctrl-C after it stops a run at once.
    """
    import psutil  # type: ignore[import-untyped]

    for number, seconds in ((signal.SIGTERM, 1.0), (signal.SIGINT, _STOP_SECONDS)):
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

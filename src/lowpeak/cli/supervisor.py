"""Supervision of vLLM servers and a trainer: restart dead servers, forward signals, end all processes together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lowpeak.cli.output import print_once
from lowpeak.cli.serve import SignalRecorder
from lowpeak.errors import EngineError
from lowpeak.vllm.serving import ServerProcess, ServerSpec, server_command
from lowpeak.watchdog import PARENT_VARIABLE

_MAX_RESTARTS = 3  # of one server, unless it ran for _STABLE_SECONDS in between
_STABLE_SECONDS = 600.0
# In a row. The first may fail because the dead server's device memory is not free yet.
_MAX_FAILED_STARTS = 2
_POLL_SECONDS = 0.3
_STOP_SECONDS = 15.0
_SAVE_SECONDS = 60.0  # for a trainer without a server to save


@dataclass(frozen=True)
class ProcessPlan:
    """The processes to start: the servers, and the trainer's command with its added environment variables."""

    servers: tuple[ServerSpec, ...]
    command: tuple[str, ...]
    trainer_environ: Mapping[str, str]
    logs: Path


@dataclass
class _SupervisedServer:
    """A server process, when it became ready, and its counts of restarts and failed starts."""

    process: ServerProcess
    ready_since: float | None = None
    was_ready: bool = False
    restarts: int = 0
    failed_starts: int = 0

    def restart_if_dead(self) -> None:
        """Restart the server if it died; EngineError if it was never ready, or has died too often."""
        process, status = self.process, self.process.status()
        if status is None:
            if self.ready_since is None and process.is_ready():
                self.ready_since, self.was_ready, self.failed_starts = time.monotonic(), True, 0
                print_once(f"lowpeak: vLLM at {process.server.url} is ready")
            return
        if self.ready_since is None:
            self.failed_starts += 1
        elif time.monotonic() - self.ready_since > _STABLE_SECONDS:
            self.restarts = 0
        self.ready_since = None
        end = process.describe_end(status)
        if not self.was_ready or self.failed_starts >= _MAX_FAILED_STARTS or self.restarts >= _MAX_RESTARTS:
            raise EngineError(f"(after {self.restarts} restarts) {end}" if self.restarts else end)
        self.restarts += 1
        process.start()
        print_once(f"lowpeak: {end}\nlowpeak: vLLM at {process.server.url} is started again (process {process.pid})")


def supervise(
    plan: ProcessPlan, environ: Mapping[str, str], command: Callable[[ServerSpec], list[str]] = server_command
) -> int:
    """Run servers and trainer until the trainer ends, and return its exit status; EngineError if a server cannot run.

    `command` returns a server's command line.
    """
    servers = [
        _SupervisedServer(ServerProcess(each, environ, plan.logs / f"vllm-{number}.log", command))
        for number, each in enumerate(plan.servers)
    ]
    trainer: subprocess.Popen[bytes] | None = None
    grace = 1.0
    with SignalRecorder() as signals:
        try:
            for each in servers:
                each.process.start()
                server = each.process.server
                where = f"{','.join(server.devices)} at {server.url}"
                print_once(f"lowpeak: vLLM starts on {where} (process {each.process.pid}), log in {each.process.log}")
            trainer_environ = {**environ, **plan.trainer_environ, PARENT_VARIABLE: str(os.getpid())}
            trainer = subprocess.Popen(plan.command, env=trainer_environ, start_new_session=True)
            status = _wait_for_trainer(trainer, servers, signals)
        except EngineError:
            print_once("lowpeak: no vLLM server available; saving and stopping")
            grace = _SAVE_SECONDS
            raise
        finally:
            if trainer is not None:
                _end_trainer(trainer, grace)
            for each in servers:
                each.process.stop()
    return 128 - status if status < 0 else status


def _wait_for_trainer(
    trainer: subprocess.Popen[bytes], servers: Sequence[_SupervisedServer], signals: SignalRecorder
) -> int:
    """Wait for the trainer to end; forward signals to it and keep the servers running."""
    num_forwarded, forwarded_at = 0, 0.0
    while trainer.poll() is None:
        if signals.count > num_forwarded:
            num_forwarded += 1
            forwarded_at = time.monotonic()
            trainer.send_signal(signal.SIGINT if signals.last == signal.SIGINT else signal.SIGTERM)
        if num_forwarded > 1 and time.monotonic() - forwarded_at > _STOP_SECONDS:
            break
        for each in servers:
            each.restart_if_dead()
        time.sleep(_POLL_SECONDS)
    return trainer.returncode if trainer.returncode is not None else -signal.SIGKILL


def _end_trainer(trainer: subprocess.Popen[bytes], grace: float) -> None:
    """End the trainer: SIGTERM, SIGINT after `grace` seconds, then SIGKILL. Ranks end with their launcher.

    After SIGTERM a run finishes its step, and a launcher ends its ranks. SIGINT after SIGTERM stops a run without saving.
    """
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGINT, _STOP_SECONDS)):
        if trainer.poll() is None:
            trainer.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                trainer.wait(seconds)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(trainer.pid, signal.SIGKILL)
    trainer.wait()

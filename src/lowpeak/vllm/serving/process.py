"""vLLM server as a child process, in a separate process group that ends with it.

With vLLM 0.32, SIGTERM during requests hung in most trials, and a killed API server left its engine running. So
`stop` aborts requests first, gives SIGTERM a few seconds, and then kills the process group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lowpeak.errors import EngineError
from lowpeak.vllm.engine_args import LaunchedServer, memory_remedy
from lowpeak.vllm.http_client import Http, deadline
from lowpeak.vllm.serving.command import ServerSpec, server_command, server_environment

_ABORT_SECONDS = 2.0
_TERM_SECONDS = 5.0
_POLL_SECONDS = 0.2
_START_SECONDS = 300.0
_LINES = 20
_UNKNOWN_OPTION = 2  # argparse's exit status


@dataclass(eq=False)
class ServerProcess:
    """One server process; its output goes to the file `log` (None: to this process's output). `command` returns its
    command line.
    """

    server: ServerSpec
    inherited: Mapping[str, str] = field(repr=False)
    log: Path | None = None
    command: Callable[[ServerSpec], list[str]] = server_command

    def __post_init__(self) -> None:
        self._http = Http(self.server.url, self.server.token)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # offset of the output since the last start

    @property
    def pid(self) -> int | None:
        """Return the id of the process and of its group; None before `start`."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server, or restart it; its output is appended to the log."""
        with ExitStack() as files:
            out = None
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                out = files.enter_context(self.log.open("ab"))
                self._log_start = out.tell()
            self._process = subprocess.Popen(
                self.command(self.server),
                env=server_environment(self.server, self.inherited),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def status(self) -> int | None:
        """Return the exit status, None while the server runs; kill the processes that an ended server left."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            self._kill_group()
        return status

    def is_ready(self) -> bool:
        """Return whether the server answers."""
        return self._http.is_healthy()

    def stop(self) -> None:
        """End the server and its process group within seven seconds, in any state."""
        if self._process is None:
            return
        if self._process.poll() is None:
            with suppress(EngineError):
                # The status does not matter: SIGTERM follows in any case.
                self._http.exchange("POST", "/pause?mode=abort", None, deadline(_ABORT_SECONDS))
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERM_SECONDS)
        self._kill_group()
        self._process.wait()

    def _kill_group(self) -> None:
        # The group's id remains valid while any member is alive.
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def describe_end(self, status: int) -> str:
        """Return a message with the exit status, the end of the log and possible remedies."""
        sentence = f"the vLLM server of {self.server.url} ended with status {status}"
        if self.log is None:
            return f"{sentence}; its output is above."
        text = self.log.read_bytes()[self._log_start :].decode("utf-8", errors="replace")
        end = "\n".join(text.splitlines()[-_LINES:])
        advice = (
            "" if status == _UNKNOWN_OPTION else f"\n{memory_remedy(LaunchedServer(self.server.tensor_parallel_size))}"
        )
        return f"{sentence}; the end of {self.log}:\n{end}{advice}"


@contextmanager
def running_server(server: ServerSpec, log: Path) -> Iterator[None]:
    """Run the block while the server answers.

    Raise EngineError with the end of its log if it ends early or starts too slowly.
    """
    process = ServerProcess(server, os.environ, log)
    process.start()
    try:
        until = time.monotonic() + _START_SECONDS
        while not process.is_ready():
            status = process.status()
            if status is not None:
                raise EngineError(process.describe_end(status))
            if time.monotonic() > until:
                raise EngineError(f"the vLLM server of {server.url} did not answer within {_START_SECONDS:.0f} s.")
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        process.stop()

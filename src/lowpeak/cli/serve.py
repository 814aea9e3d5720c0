"""`lowpeak serve`: vLLM's own server, with what weight updates need, and ended with all its processes.

It is reached from this machine alone unless `--host` says otherwise, and demands a token. All other options are vLLM's.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from lowpeak.arguments import SERVER_TOKEN
from lowpeak.cli.arguments import Parser
from lowpeak.cli.devices import read_devices
from lowpeak.cli.output import tell
from lowpeak.errors import ArgumentError
from lowpeak.vllm import require_vllm
from lowpeak.vllm.serving import LOOPBACK, Server, ServerProcess, saved_token

_POLL_SECONDS = 0.2
_VLLM_TOKEN = "VLLM_API_KEY"


def run(argv: Sequence[str]) -> int:
    """Start a server and wait for its end."""
    server = read_options(argv, os.environ)
    require_vllm("lowpeak serve")
    check_port(server)
    process = ServerProcess(server, os.environ)
    if server.token == os.environ.get(SERVER_TOKEN):
        return wait_for(process)
    with saved_token(server.port, server.token) as path:
        tell(
            f"lowpeak: the server demands the token in {path}; your runs on this host find it there, others need it as "
            f"{SERVER_TOKEN} in their environment"
        )
        return wait_for(process)


def wait_for(process: ServerProcess) -> int:
    """Start the process and wait for its end, or for a signal: 0 after SIGTERM, 130 after Ctrl-C, else its exit status."""
    status: int | None = None
    with Signals() as signals:
        try:
            process.start()
            while signals.last is None and status is None:
                time.sleep(_POLL_SECONDS)
                status = process.status()
        finally:
            process.stop()
    if status is None:
        return 130 if signals.last == signal.SIGINT else 0
    tell(f"lowpeak: error: {process.describe_end(status)}")
    return 128 - status if status < 0 else status or 1


def read_options(argv: Sequence[str], environ: Mapping[str, str]) -> Server:
    """Return the server that the words ask for; ArgumentError if it cannot be started."""
    told, options = _parser().parse_known_args(argv)
    token = told.token or environ.get(SERVER_TOKEN)
    server = Server(
        model=told.model,
        host=told.host,
        port=told.port,
        **({"token": token} if token else {}),
        tensor_parallel_size=told.tensor_parallel_size,
        devices=() if told.devices is None else read_devices(told.devices, "--devices"),
        dtype=told.dtype,
        options=tuple(options),
    )
    if not token and environ.get(_VLLM_TOKEN):
        raise ArgumentError(
            f"{_VLLM_TOKEN} guards only some of vLLM's routes, not those that change weights: set {SERVER_TOKEN} instead."
        )
    return server


def check_port(server: Server) -> None:
    """Raise ArgumentError if the server cannot listen: its port is taken, or its host is not this one."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        socket.create_server((server.host, server.port), family=family).close()
    except OSError as error:
        raise ArgumentError(
            f"--port {server.port} of --host {server.host} cannot be listened on ({error.strerror}): choose another one."
        ) from error


def _parser() -> Parser:
    parser = Parser(
        prog="lowpeak serve",
        usage="lowpeak serve --model MODEL [--argument value ...] [vLLM's own options]",
        description=__doc__.split("\n\n")[1] if __doc__ else None,
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="", help="model to serve, the one that is trained: a folder or a hub name")
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on (127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (8000)")
    parser.add_argument("--token", help=f"demand this token (a new one); better in the environment, as {SERVER_TOKEN}")
    parallel = ("--tensor_parallel_size", "--tensor-parallel-size")
    parser.add_argument(*parallel, type=int, default=1, help="devices that a copy of the model is sharded over")
    parser.add_argument("--devices", help="devices to run on, as in 1,2 or cpu; by default those that vLLM takes")
    parser.add_argument("--dtype", help="dtype of the weights; by default the checkpoint's")
    return parser


class Signals:
    """A context that notes SIGINT, SIGTERM and SIGHUP, so that a loop can end what it watches."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.count = 0

    def __enter__(self) -> Signals:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.last = number
        self.count += 1

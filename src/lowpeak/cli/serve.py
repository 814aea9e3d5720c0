"""`lowpeak serve`: vLLM's server with weight updates, ended together with all its processes.

The server listens on this machine only unless `--host` is set, and requires a token. All other options are vLLM's.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from lowpeak.arguments import SERVER_TOKEN
from lowpeak.cli.arguments import ErrorParser
from lowpeak.cli.devices import read_devices
from lowpeak.cli.output import print_once
from lowpeak.errors import ArgumentError
from lowpeak.vllm import require_vllm
from lowpeak.vllm.serving import LOOPBACK, ServerProcess, ServerSpec, saved_token

_POLL_SECONDS = 0.2
_VLLM_TOKEN = "VLLM_API_KEY"
# Options of `trl vllm-serve` that vLLM has under another name, and those that are switches of vLLM.
_TRL_NAMES = {"vllm-model-impl": "model-impl", "log-level": "uvicorn-log-level"}
_TRL_SWITCHES = ("enforce-eager", "enable-prefix-caching", "trust-remote-code")
_BOOLEANS = {"true": "", "false": "no-"}


def run_server(argv: Sequence[str]) -> int:
    """Start a server, wait for its end and return the exit status."""
    server = parse_server(argv, os.environ)
    require_vllm("lowpeak serve")
    check_port(server)
    process = ServerProcess(server, os.environ)
    if server.token == os.environ.get(SERVER_TOKEN):
        return wait_for(process)
    with saved_token(server.port, server.token) as path:
        print_once(
            f"lowpeak: the server requires the token in {path}; your runs on this host read it there, others need it "
            f"as {SERVER_TOKEN} in their environment"
        )
        return wait_for(process)


def wait_for(process: ServerProcess) -> int:
    """Start the process and wait for its end or a signal; return 0 after SIGTERM, 130 after Ctrl-C, else its exit status."""
    status: int | None = None
    with SignalRecorder() as signals:
        try:
            process.start()
            while signals.last is None and status is None:
                time.sleep(_POLL_SECONDS)
                status = process.status()
        finally:
            process.stop()
    if status is None:
        return 130 if signals.last == signal.SIGINT else 0
    print_once(f"lowpeak: error: {process.describe_end(status)}")
    return 128 - status if status < 0 else status or 1


def parse_server(argv: Sequence[str], environ: Mapping[str, str]) -> ServerSpec:
    """Return the server that the arguments describe; ArgumentError for arguments that it cannot have."""
    parsed, options = _parser().parse_known_args(argv)
    token = parsed.token or environ.get(SERVER_TOKEN)
    server = ServerSpec(
        model=parsed.model,
        host=parsed.host,
        port=parsed.port,
        **({"token": token} if token else {}),
        tensor_parallel_size=parsed.tensor_parallel_size,
        devices=() if parsed.devices is None else read_devices(parsed.devices, "--devices"),
        dtype=parsed.dtype,
        options=tuple(_vllm_options(options)),
    )
    if not token and environ.get(_VLLM_TOKEN):
        raise ArgumentError(
            f"{_VLLM_TOKEN} protects only some of vLLM's routes, not those that change weights: set {SERVER_TOKEN} instead."
        )
    return server


def _vllm_options(options: Sequence[str]) -> list[str]:
    """Return vLLM's options; those of `trl vllm-serve` under vLLM's names, its booleans as switches (`--no-enforce-eager`)."""
    translated: list[str] = []
    for word in options:
        name, equals, value = word.partition("=")
        if _option_name(name) in _TRL_NAMES:
            translated.append(f"--{_TRL_NAMES[_option_name(name)]}{equals}{value}")
        elif equals and _option_name(name) in _TRL_SWITCHES and value.lower() in _BOOLEANS:
            translated.append(f"--{_BOOLEANS[value.lower()]}{_option_name(name)}")
        elif translated and _option_name(translated[-1]) in _TRL_SWITCHES and word.lower() in _BOOLEANS:
            translated[-1] = f"--{_BOOLEANS[word.lower()]}{_option_name(translated[-1])}"
        else:
            translated.append(word)
    return translated


def _option_name(word: str) -> str:
    """Return the name of an option with dashes, an empty string for another word."""
    return word[2:].replace("_", "-") if word.startswith("--") else ""


def check_port(server: ServerSpec) -> None:
    """Raise ArgumentError if the server cannot listen on its host and port."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        socket.create_server((server.host, server.port), family=family).close()
    except OSError as error:
        raise ArgumentError(
            f"--port {server.port} on --host {server.host} is not available ({error.strerror}): choose another port or host."
        ) from error


def _parser() -> ErrorParser:
    parser = ErrorParser(
        prog="lowpeak serve",
        usage="lowpeak serve --model MODEL [--argument value ...] [vLLM's own options]",
        description=__doc__.split("\n\n")[1] if __doc__ else None,
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="", help="model to serve, the same that is trained: a folder or a hub name")
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    parser.add_argument(
        "--token",
        help=f"token that clients must send (default: a random one); safer as {SERVER_TOKEN} in the environment",
    )
    parallel = ("--tensor_parallel_size", "--tensor-parallel-size")
    parser.add_argument(*parallel, type=int, default=1, help="devices that the model is sharded over (default: 1)")
    parser.add_argument("--devices", help="devices to run on, such as 1,2 or cpu; by default vLLM's choice")
    parser.add_argument("--dtype", help="dtype of the weights; by default the checkpoint's")
    return parser


class SignalRecorder:
    """A context that records SIGINT, SIGTERM and SIGHUP instead of letting them end the process."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.count = 0

    def __enter__(self) -> SignalRecorder:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._record) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.last = number
        self.count += 1

"""Transport to workers anywhere: each connects to the trainer and reads the buckets from its socket.

The trainer listens while an update begins, only on the loopback address if all workers are on its host. A worker
sends this update's token, which it received through vLLM, and gets a proof that the trainer knows the token too.
Weights are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowpeak.errors import EngineError
from lowpeak.vllm.protocol import start_thread
from lowpeak.vllm.weight_sync.buckets import Bucket, BucketReceiver, BucketSender, ReceiveCall
from lowpeak.watchdog import accept_authenticated

_TOKEN_LENGTH = 64  # characters of a token or its proof


class TcpSender(BucketSender):
    """Trainer's end; every wait ends after `timeout` seconds. `port` is where it listens (None: any free port)."""

    name = "tcp"

    def __init__(self, bucket_bytes: int, *, loopback: bool, timeout: float, port: int | None = None) -> None:
        super().__init__(bucket_bytes, torch.device("cpu"))
        self._timeout = timeout
        self._token = secrets.token_hex(_TOKEN_LENGTH // 2)
        self._peers: list[socket.socket] = []
        try:
            self._listener = socket.create_server(("127.0.0.1" if loopback else "", port or 0))
        except OSError as error:
            raise EngineError(
                f"Cannot listen at {port or 'any port'} for weight updates ({error.strerror}): set vllm_group_port to a free one."
            ) from error
        self._hosts = ["127.0.0.1"] if loopback else host_addresses()
        self._accept_thread = threading.Thread(target=self._accept, name="lowpeak-weights", daemon=True)
        self._accept_thread.start()

    def invitation(self) -> dict[str, Any]:
        port = self._listener.getsockname()[1]
        arguments = {"hosts": self._hosts, "port": port, "token": self._token, "timeout": self._timeout}
        return {"transport": self.name, **arguments}

    def wait_connected(self) -> None:
        self._stop_listening()

    def deliver(self, bucket: Bucket, receive: ReceiveCall) -> None:
        """Write the bucket to every worker while the workers read; a worker's error takes precedence over a broken
        socket.
        """

        def read() -> None:
            try:
                receive({"num_bytes": len(bucket.data)})
            except BaseException:
                # So that `_write` does not wait for a worker that does not read.
                self._disconnect()
                raise

        reading = start_thread(read)
        broken = self._write(bucket.data.numpy().data)
        reading.result()
        if broken is not None:
            raise EngineError(f"A worker of vLLM stopped reading the weights ({broken}).") from broken

    def close(self) -> None:
        self._stop_listening()
        self._disconnect()

    def _write(self, data: memoryview) -> OSError | None:
        try:
            for peer in self._peers:
                peer.sendall(data)
        except OSError as error:
            # Ends the other workers' reads too.
            self._disconnect()
            return error
        return None

    def _accept(self) -> None:
        """Accept connections that know the token, until the listener is shut down."""
        for peer, _ in accept_authenticated(self._listener, self._token.encode()):
            try:
                peer.settimeout(self._timeout)
                peer.sendall(_proof(self._token))
                self._peers.append(peer)
            except OSError:
                peer.close()

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accept_thread.join(self._timeout)

    def _disconnect(self) -> None:
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()


class TcpReceiver(BucketReceiver):
    """Worker's end: connects to the first of `hosts` that proves to know the token."""

    def __init__(self, hosts: Sequence[str], port: int, token: str, timeout: float) -> None:
        self._peer = _connect(hosts, port, token, timeout)
        self._data = bytearray()

    def read(self, arguments: Mapping[str, Any]) -> Tensor:
        num_bytes = arguments["num_bytes"]
        if len(self._data) < num_bytes:
            self._data = bytearray(num_bytes)
        _receive_into(self._peer, memoryview(self._data)[:num_bytes])
        return torch.frombuffer(self._data, dtype=torch.uint8)

    def close(self) -> None:
        self._peer.close()
        self._data = bytearray()


def _connect(hosts: Sequence[str], port: int, token: str, timeout: float) -> socket.socket:
    failures = []
    deadline = time.monotonic() + timeout
    for i, host in enumerate(hosts):
        share = max(0.1, (deadline - time.monotonic()) / (len(hosts) - i))
        try:
            until = time.monotonic() + min(share, 10.0)
            peer = socket.create_connection((host, port), min(share, 10.0))
            peer.sendall(token.encode())
            if hmac.compare_digest(_receive_into(peer, bytearray(_TOKEN_LENGTH), until), _proof(token)):
                peer.settimeout(timeout)
                return peer
            failures.append(f"{host}: another service answers")
        except OSError as error:
            failures.append(f"{host}: {error}")
    raise EngineError(f"vLLM's worker cannot connect to the trainer for weights ({'; '.join(failures)}).")


def _receive_into(
    peer: socket.socket, into: bytearray | memoryview, until: float | None = None
) -> bytearray | memoryview:
    """Fill `into` from a socket; raise ConnectionError if it ends early, TimeoutError after `until`."""
    view = memoryview(into)
    while view:
        # A socket's timeout restarts with every byte.
        if until is not None:
            peer.settimeout(max(0.001, until - time.monotonic()))
        count = peer.recv_into(view)
        if not count:
            raise ConnectionError("the connection ended")
        view = view[count:]
    return into


def _proof(token: str) -> bytes:
    return hashlib.sha256(f"lowpeak {token}".encode()).hexdigest().encode()


def host_addresses() -> list[str]:
    """Return addresses by which other hosts may reach this one, first that of the default route."""
    addresses: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # A documentation address (RFC 5737): nothing is sent.
        probe.connect(("192.0.2.1", 9))
        addresses.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        addresses += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return list(dict.fromkeys([*addresses, "127.0.0.1"]))

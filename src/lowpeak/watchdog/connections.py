"""Connections between the ranks' watches: lines of JSON over TCP, on which the kernel itself notices a peer that is gone."""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lowpeak.ranks import Ranks

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 30.0
LOOPBACK = "127.0.0.1"
# A host that is lost closes nothing: the kernel probes it, and gives the connection up after 10 + 4 * 5 seconds.
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
_SEND_SECONDS = 5.0
_RANK_BYTES = 4
MAX_STRANGERS = 128
_TICK = 0.25  # seconds until another thread's close of the server is noticed

Callers = dict[socket.socket, bytes]  # what each has sent so far, the oldest caller first

_open: weakref.WeakSet[Line] = weakref.WeakSet()


class Line:
    """A connection to the watch of `rank`, on which both ends send JSON values, one a line."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self.connection = connection
        self._pending = b""
        self._sending = threading.Lock()
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in _PROBES.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        _open.add(self)

    def send(self, *message: Any) -> None:
        """Send a message; one to a peer that is gone is lost, which whoever receives from it learns by itself."""
        with self._sending, suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[list[Any]]:
        """Return the messages that have come; EOFError if the peer is gone."""
        try:
            data = self.connection.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError as error:
            raise EOFError(error.strerror) from error
        if not data:
            raise EOFError("the connection was closed")
        *whole, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in whole]

    def close(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def connect(ranks: Ranks) -> list[Line] | None:
    """Return rank 0's lines to all others, or a rank's line to rank 0; None with one warning if a rank cannot connect."""
    server, token = None, secrets.token_hex(16)
    hosts = ranks.gather(_this_host())
    is_one_host = len(set(hosts)) == 1
    if ranks.rank == 0:
        server = _listen(ranks.world_size + MAX_STRANGERS, loopback=is_one_host)
    # the name by which the other ranks found rank 0's host, or what the host calls itself
    own = LOOPBACK if is_one_host else os.environ.get("MASTER_ADDR") or socket.gethostname()
    found = ranks.gather((own, server.getsockname()[1], token) if server else None)[0]
    assert found is not None, "rank 0 listens"
    host, port, token = found
    lines: list[Line] = []
    problem: str | None = None
    try:
        lines = answer(server, token, ranks.world_size - 1) if server else [call(host, port, token, ranks.rank)]
    except OSError as error:
        problem = f"rank {ranks.rank} on {socket.gethostname()} with {host}:{port}: {error}"
    finally:
        if server is not None:
            server.close()
    problems = [each for each in ranks.gather(problem) if each]
    if not problems:
        return lines
    for line in lines:
        line.close()
    if ranks.rank == 0:
        logger.warning(
            "The ranks cannot watch each other (%s): one that goes away is noticed by the collectives' time limit alone.",
            problems[-1],
        )
    return None


def _listen(backlog: int, *, loopback: bool) -> socket.socket:
    """Listen on a free port, at the loopback address or at all addresses of this host."""
    if loopback:
        return socket.create_server((LOOPBACK, 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def _this_host() -> str:
    """Name the boot of the machine and the network namespace: equal exactly if the loopback address is shared."""
    with suppress(OSError):  # not Linux
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()}{os.stat('/proc/self/ns/net').st_ino}"
    return socket.gethostname()


def call(host: str, port: int, token: str, rank: int) -> Line:
    """Connect to rank 0 and send it the token and this rank's number."""
    connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    connection.sendall(token.encode() + rank.to_bytes(_RANK_BYTES))
    return Line(connection, 0)


def answer(server: socket.socket, token: str, number: int) -> list[Line]:
    """Return a line to each of so many ranks, which show the token and their rank; TimeoutError if one does not call."""
    lines: list[Line] = []
    for connection, rank in accept_known(server, token.encode(), _RANK_BYTES, time.monotonic() + CONNECT_SECONDS):
        lines.append(Line(connection, int.from_bytes(rank)))
        if len(lines) == number:
            return lines
    for line in lines:
        line.close()
    raise TimeoutError(f"{len(lines)} of {number} ranks called within {CONNECT_SECONDS:.0f} s")


def accept_known(
    server: socket.socket, token: bytes, num_more: int = 0, until: float = float("inf")
) -> Iterator[tuple[socket.socket, bytes]]:
    """Yield each connection that begins with `token`, and the `num_more` bytes after it.

    Ends at the monotonic time `until`, or when another thread closes the server. Callers are read together, so none waits for
    another. Of more than MAX_STRANGERS that have not shown the token, the one that has waited longest is dropped.
    """
    size = len(token) + num_more
    callers: Callers = {}
    try:
        server.setblocking(False)
        while (left := until - time.monotonic()) > 0:
            for ready in wait([server, *callers], min(_TICK, left)):
                assert isinstance(ready, socket.socket), "only sockets are waited for"
                if ready is server:
                    _admit(server, callers)
                elif ready in callers and len(greeting := _receive(ready, callers, size)) == size:
                    del callers[ready]
                    if hmac.compare_digest(greeting[: len(token)], token):
                        yield ready, greeting[len(token) :]
                    else:
                        ready.close()
    except (OSError, ValueError):
        if server.fileno() >= 0:
            raise
    finally:
        for caller in callers:
            caller.close()


def _admit(server: socket.socket, callers: Callers) -> None:
    with suppress(OSError):  # the caller has left already, or the server was closed
        caller, _ = server.accept()
        caller.setblocking(False)
        if len(callers) == MAX_STRANGERS:
            oldest = next(iter(callers))
            del callers[oldest]
            oldest.close()
        callers[caller] = b""


def _receive(caller: socket.socket, callers: Callers, size: int) -> bytes:
    """Return what a caller has sent so far; drop a caller that has left."""
    try:
        more = caller.recv(size - len(callers[caller]))
    except BlockingIOError:
        return callers[caller]
    except OSError:
        more = b""
    callers[caller] += more
    if more:
        return callers[caller]
    del callers[caller]
    caller.close()
    return b""


def _forget() -> None:
    """In a forked child: it must not keep the connections of a rank that has died open."""
    for line in list(_open):
        line.connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

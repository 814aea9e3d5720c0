"""TCP connections between ranks, authenticated by a token, with JSON messages.

They need no heartbeat: the kernel closes a connection when the other process dies, and probes for hosts that are lost.
"""

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
# A lost host closes no connection: the kernel probes it, and gives up after 10 + 4 * 5 seconds.
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
_SEND_SECONDS = 5.0
_RANK_BYTES = 4
MAX_UNVERIFIED = 128  # connections that have not sent the token yet
_POLL_SECONDS = 0.25  # until a server that another thread closed is noticed

Unverified = dict[socket.socket, bytes]  # bytes received from each, the oldest connection first

_open: weakref.WeakSet[RankConnection] = weakref.WeakSet()


class RankConnection:
    """A connection to `rank` on which both ends send JSON lists, one per line."""

    def __init__(self, raw: socket.socket, rank: int) -> None:
        self.rank = rank
        self.socket = raw
        self._partial = b""  # the beginning of a message that has not come completely
        self._sending = threading.Lock()
        raw.settimeout(_SEND_SECONDS)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in _PROBES.items():
            if hasattr(socket, option):
                raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        _open.add(self)

    def send(self, *message: Any) -> None:
        """Send a message; drop it if the other end is gone, which `receive` reports."""
        with self._sending, suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[list[Any]]:
        """Return the messages that have arrived; raise EOFError if the other end is gone."""
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError as error:
            raise EOFError(error.strerror) from error
        if not data:
            raise EOFError("the connection was closed")
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _open_connections(
    server: socket.socket | None, host: str, port: int, token: str, ranks: Ranks
) -> list[RankConnection]:
    """Return connections of the rank with the `server` to all others; of another rank, the one to it."""
    if server is None:
        return [connect_to_rank_0(host, port, token, ranks.rank)]
    with server:
        return accept_ranks(server, token, ranks.world_size - 1)


def connect(ranks: Ranks) -> list[RankConnection] | None:
    """Connect all ranks with rank 0, and return this rank's connections.

    Rank 0 has one to each other rank, the others have one to rank 0. Return None, and log one warning, if a rank cannot
    connect. All ranks must call it.
    """
    server, token = None, secrets.token_hex(16)
    hosts = ranks.gather(network_id())
    is_one_host = len(set(hosts)) == 1
    if ranks.rank == 0:
        server = _listen(ranks.world_size + MAX_UNVERIFIED, loopback=is_one_host)
    # Other hosts have reached rank 0's at MASTER_ADDR before; its hostname may not resolve there.
    address = LOOPBACK if is_one_host else os.environ.get("MASTER_ADDR") or socket.gethostname()
    endpoint = ranks.gather((address, server.getsockname()[1], token) if server else None)[0]
    assert endpoint is not None, "rank 0 listens"
    host, port, token = endpoint
    connections: list[RankConnection] = []
    problem: str | None = None
    try:
        connections = _open_connections(server, host, port, token, ranks)
    except OSError as error:
        problem = f"rank {ranks.rank} on {socket.gethostname()} with {host}:{port}: {error}"
    problems = [each for each in ranks.gather(problem) if each]
    if not problems:
        return connections
    for connection in connections:
        connection.close()
    if ranks.rank == 0:
        logger.warning(
            "The ranks cannot monitor each other (%s). A rank that dies is noticed only after the collectives' timeout.",
            problems[-1],
        )
    return None


def _listen(backlog: int, *, loopback: bool) -> socket.socket:
    """Listen on a free port of the loopback address, or of all addresses of this host."""
    if loopback:
        return socket.create_server((LOOPBACK, 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def network_id() -> str:
    """Return an id of this process's network: processes with equal ids share the loopback address."""
    with suppress(OSError):  # not Linux
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()}{os.stat('/proc/self/ns/net').st_ino}"
    return socket.gethostname()


def connect_to_rank_0(host: str, port: int, token: str, rank: int) -> RankConnection:
    """Connect to rank 0 and send it the token and this rank's number."""
    raw = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    raw.sendall(token.encode() + rank.to_bytes(_RANK_BYTES))
    return RankConnection(raw, 0)


def accept_ranks(server: socket.socket, token: str, number: int) -> list[RankConnection]:
    """Accept connections of `number` ranks, which send the token and their rank; raise TimeoutError if one is missing."""
    connections: list[RankConnection] = []
    for raw, rank in accept_authenticated(server, token.encode(), _RANK_BYTES, time.monotonic() + CONNECT_SECONDS):
        connections.append(RankConnection(raw, int.from_bytes(rank)))
        if len(connections) == number:
            return connections
    for connection in connections:
        connection.close()
    raise TimeoutError(f"{len(connections)} of {number} ranks connected within {CONNECT_SECONDS:.0f} s")


def accept_authenticated(
    server: socket.socket, token: bytes, num_more: int = 0, until: float = float("inf")
) -> Iterator[tuple[socket.socket, bytes]]:
    """Yield each connection that begins with `token`, and the `num_more` bytes after the token.

    Ends at the monotonic time `until`, or when another thread closes the server. Connections are read concurrently, so a slow
    one delays no other. Of more than MAX_UNVERIFIED that have not sent the token, the oldest is dropped.
    """
    size = len(token) + num_more
    unverified: Unverified = {}
    try:
        server.setblocking(False)
        while (remaining := until - time.monotonic()) > 0:
            for ready in wait([server, *unverified], min(_POLL_SECONDS, remaining)):
                assert isinstance(ready, socket.socket), "only sockets are waited for"
                if ready is server:
                    _admit(server, unverified)
                elif ready in unverified and len(greeting := _receive(ready, unverified, size)) == size:
                    del unverified[ready]
                    if hmac.compare_digest(greeting[: len(token)], token):
                        yield ready, greeting[len(token) :]
                    else:
                        ready.close()
    except (OSError, ValueError):
        if server.fileno() >= 0:
            raise
    finally:
        for client in unverified:
            client.close()


def _admit(server: socket.socket, unverified: Unverified) -> None:
    with suppress(OSError):  # the client has closed the connection already, or this server was closed
        client, _ = server.accept()
        client.setblocking(False)
        if len(unverified) == MAX_UNVERIFIED:
            oldest = next(iter(unverified))
            del unverified[oldest]
            oldest.close()
        unverified[client] = b""


def _receive(client: socket.socket, unverified: Unverified, size: int) -> bytes:
    """Return the bytes received from a client so far; drop a client that has closed its connection."""
    try:
        more = client.recv(size - len(unverified[client]))
    except BlockingIOError:
        return unverified[client]
    except OSError:
        more = b""
    unverified[client] += more
    if more:
        return unverified[client]
    del unverified[client]
    client.close()
    return b""


def _close_in_child() -> None:
    """Close a forked child's copies of the connections: they would keep them open after its rank has died."""
    for connection in list(_open):
        connection.socket.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)

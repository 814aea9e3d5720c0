"""Connections whose callers show a token, taken from a listening socket; other callers cost them no time."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

MAX_STRANGERS = 128
_TICK = 0.25  # seconds until another thread's close of the server is noticed


def accept_known(
    server: socket.socket, token: bytes, num_more: int = 0, until: float = float("inf")
) -> Iterator[tuple[socket.socket, bytes]]:
    """Yield each connection that begins with `token`, and the `num_more` bytes after it.

    Ends at the monotonic time `until`, or when another thread closes the server. Callers are read together, so none waits for
    another. Of more than MAX_STRANGERS that have not shown the token, the one that has waited longest is dropped.
    """
    try:
        callers = _Strangers(server, len(token) + num_more)
    except (OSError, ValueError):
        if server.fileno() < 0:
            return
        raise
    with callers as strangers:
        while server.fileno() >= 0 and (left := until - time.monotonic()) > 0:
            for connection, greeting in strangers.read(min(_TICK, left)):
                if hmac.compare_digest(greeting[: len(token)], token):
                    yield connection, greeting[len(token) :]
                else:
                    connection.close()


class _Strangers:
    """Callers of a server who have not sent `size` bytes yet."""

    def __init__(self, server: socket.socket, size: int) -> None:
        self._server = server
        self._size = size
        self._received: dict[socket.socket, bytes] = {}  # the oldest caller first
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> _Strangers:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in list(self._received):
            self._drop(connection)
        self._selector.close()

    def read(self, seconds: float) -> list[tuple[socket.socket, bytes]]:
        """Wait for callers and their bytes; return those whose bytes are complete."""
        found = []
        for key, _ in self._selector.select(seconds):
            connection = key.fileobj
            assert isinstance(connection, socket.socket), "only sockets are registered"
            if connection is self._server:
                self._accept()
            elif connection in self._received and len(greeting := self._receive(connection)) == self._size:
                self._selector.unregister(connection)
                del self._received[connection]
                found.append((connection, greeting))
        return found

    def _accept(self) -> None:
        with suppress(OSError):  # the caller has left already, or the server was closed
            connection, _ = self._server.accept()
            connection.setblocking(False)
            if len(self._received) == MAX_STRANGERS:
                self._drop(next(iter(self._received)))
            self._received[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> bytes:
        """Return what a caller has sent so far; drop a caller that has left."""
        try:
            more = connection.recv(self._size - len(self._received[connection]))
        except BlockingIOError:
            return self._received[connection]
        except OSError:
            more = b""
        if not more:
            self._drop(connection)
            return b""
        self._received[connection] += more
        return self._received[connection]

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._received[connection]
        connection.close()

"""Connections whose callers show a token, taken from a listening socket; other callers cost them no time."""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait

MAX_STRANGERS = 128
_TICK = 0.25  # seconds until another thread's close of the server is noticed

Callers = dict[socket.socket, bytes]  # what each has sent so far, the oldest caller first


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

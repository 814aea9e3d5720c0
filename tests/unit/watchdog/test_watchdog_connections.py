"""Authentication of connections to rank 0: unverified clients neither end the run nor delay its ranks."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lowpeak.watchdog.connections import accept_authenticated, accept_ranks, connect_to_rank_0

TOKEN = "0123456789abcdef" * 2


def stranger(server, data=b""):
    """A connection that sends `data` and stays."""
    caller = socket.create_connection(server.getsockname(), timeout=5)
    caller.sendall(data)
    return caller


STRANGERS = {
    "a number": lambda server: stranger(server, b"5\n"),
    "a mapping": lambda server: stranger(server, b'{"a":1}\n'),
    "brackets": lambda server: stranger(server, b"[" * 60_000 + b"\n"),
    "a long number": lambda server: stranger(server, b"9" * 60_000 + b"\n"),
    "no text": lambda server: stranger(server, bytes(range(256)) * 200),
    "a browser": lambda server: stranger(server, b"GET / HTTP/1.1\r\n\r\n"),
    "a guess": lambda server: stranger(server, b"0" * len(TOKEN) + bytes(4)),
    "a part of the token": lambda server: stranger(server, TOKEN[:-1].encode()).close(),
    "six who are silent": lambda server: [stranger(server) for _ in range(6)],
    "a crowd": lambda server: [stranger(server) for _ in range(250)],
}


@pytest.mark.parametrize("who", STRANGERS)
def test_unverified_clients_neither_stop_rank_0_nor_keep_out_a_late_rank(who):
    with socket.create_server(("127.0.0.1", 0), backlog=300) as server, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept_ranks, server, TOKEN, 2)
        port = server.getsockname()[1]
        early = connect_to_rank_0("127.0.0.1", port, TOKEN, 2)
        kept = STRANGERS[who](server)
        time.sleep(0.3)
        late = connect_to_rank_0("127.0.0.1", port, TOKEN, 1)
        late.send("phase", "train")  # may come with the token
        connections = accepted.result(5)
        assert [connection.rank for connection in connections] == [2, 1]
        assert connections[1].receive() == [["phase", "train"]]
        for connection in (early, late, *connections):
            connection.close()
        del kept


def test_a_closed_server_accepts_no_connection():
    server = socket.create_server(("127.0.0.1", 0))
    server.close()
    assert list(accept_authenticated(server, b"token")) == []


def test_a_rank_that_does_not_connect_is_a_timeout(monkeypatch):
    monkeypatch.setattr("lowpeak.watchdog.connections.CONNECT_SECONDS", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        pytest.raises(TimeoutError),
    ):
        accept_ranks(server, TOKEN, 1)

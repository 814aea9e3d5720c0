"""Who may call rank 0's watch: strangers' bytes, silence and number neither end the run nor keep its ranks waiting."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lowpeak.watch.handshake import accept_known
from lowpeak.watch.lines import Line, _answer, _call

TOKEN = "0123456789abcdef" * 2


class Door:
    """Rank 0, which awaits `number` ranks in a thread."""

    def __init__(self, number: int) -> None:
        self.server = socket.create_server(("127.0.0.1", 0), backlog=300)
        self.lines: list[Line] = []
        self.failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._answer, args=(number,), daemon=True)
        self._thread.start()

    def _answer(self, number: int) -> None:
        try:
            self.lines = _answer(self.server, TOKEN, number)
        except BaseException as error:
            self.failed.append(error)

    def call(self, rank: int) -> Line:
        """The line of a rank to rank 0."""
        return _call("127.0.0.1", self.server.getsockname()[1], TOKEN, rank)

    def stranger(self, data: bytes = b"") -> socket.socket:
        """A connection that sends `data` and stays."""
        caller = socket.create_connection(self.server.getsockname(), timeout=5)
        caller.sendall(data)
        return caller

    def ranks(self, seconds: float = 5.0) -> list[int]:
        """The ranks that were let in, in their order."""
        self._thread.join(seconds)
        assert not self.failed
        assert not self._thread.is_alive()
        return [line.rank for line in self.lines]


@contextmanager
def door(number: int) -> Iterator[Door]:
    found = Door(number)
    try:
        yield found
    finally:
        found.server.close()
        for line in found.lines:
            line.close()


STRANGERS: dict[str, Callable[[Door], object]] = {
    "a number": lambda door: door.stranger(b"5\n"),
    "a mapping": lambda door: door.stranger(b'{"a":1}\n'),
    "brackets": lambda door: door.stranger(b"[" * 60_000 + b"\n"),
    "a long number": lambda door: door.stranger(b"9" * 60_000 + b"\n"),
    "no text": lambda door: door.stranger(bytes(range(256)) * 200),
    "a browser": lambda door: door.stranger(b"GET / HTTP/1.1\r\n\r\n"),
    "a guess": lambda door: door.stranger(b"0" * len(TOKEN) + bytes(4)),
    "a part of the token": lambda door: door.stranger(TOKEN[:-1].encode()).close(),
    "six who are silent": lambda door: [door.stranger() for _ in range(6)],
    "a crowd": lambda door: [door.stranger() for _ in range(250)],
}


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_neither_stop_rank_0_nor_keep_a_late_rank_out(who: str) -> None:
    with door(2) as open_door:
        early = open_door.call(2)
        kept = STRANGERS[who](open_door)
        time.sleep(0.3)
        late = open_door.call(1)
        late.send("phase", "train")  # may come with the token
        assert open_door.ranks() == [2, 1]
        assert open_door.lines[1].receive() == [["phase", "train"]]
        for line in (early, late):
            line.close()
        del kept


def test_a_server_that_was_closed_before_lets_nobody_in() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    server.close()
    assert list(accept_known(server, b"token")) == []


def test_a_rank_that_never_calls_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowpeak.watch.lines.CONNECT_SECONDS", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        pytest.raises(TimeoutError),
    ):
        _answer(server, TOKEN, 1)

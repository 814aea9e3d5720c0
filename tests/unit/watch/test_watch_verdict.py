"""The watch, both ends in one process: who tells whom what, and which errors it explains."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lowpeak.errors import DataError, RankError
from lowpeak.watch.lines import Line
from lowpeak.watch.watch import Watch

BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:24223")


def ends() -> tuple[Line, Line]:
    """Rank 0's line to rank 1, and rank 1's to rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname(), timeout=5)
        here, _ = server.accept()
    return Line(here, 1), Line(there, 0)


@contextmanager
def two_ranks() -> Iterator[tuple[Watch, Watch, Line]]:
    """Both ranks' watches, and rank 1's line."""
    first, second = ends()
    with Watch(0, [first], lambda: "phase train", 60.0) as zero:
        one = Watch(1, [second], lambda: "phase reward", 60.0)
        one.__enter__()
        yield zero, one, second
        one.__exit__(None, None, None)


def told(watch: Watch, error: Exception, seconds: float = 5.0) -> str:
    """What the watch makes of an error once it knows of another rank's failure."""
    deadline = time.monotonic() + seconds
    found = None
    while found is None and time.monotonic() < deadline:
        found = watch.explain(error)
        time.sleep(0.02)
    return str(found)


@pytest.mark.parametrize("speaker", [0, 1])
def test_an_error_that_one_rank_announces_is_the_others_reason(speaker: int) -> None:
    with two_ranks() as (*watches, _):
        watches[speaker].announce(DataError("row 3 has no prompt."))
        where = ("phase train", "phase reward")
        assert told(watches[1 - speaker], BROKEN) == (
            f"rank {speaker} failed in {where[speaker]}: row 3 has no prompt. Rank {1 - speaker} was in "
            f"{where[1 - speaker]} and cannot go on without it."
        )


def test_a_line_that_ends_without_a_goodbye_is_a_rank_that_is_gone() -> None:
    with two_ranks() as (zero, _, line):
        line.connection.shutdown(socket.SHUT_RDWR)
        assert told(zero, BROKEN).startswith("rank 1 is gone (killed, or its host is lost)")


def test_a_rank_that_is_done_may_leave_before_the_others() -> None:
    first, second = ends()
    with Watch(0, [first], lambda: "phase train", 1.0) as zero:
        with Watch(1, [second], lambda: "phase train", 1.0):
            pass
        assert zero.explain(ValueError("of this rank's own")) is None
        assert "though all are alive" in str(zero.explain(BROKEN))


def test_an_error_of_this_ranks_own_is_not_explained_away() -> None:
    with two_ranks() as (zero, one, _):
        assert zero.explain(ValueError("a bug of the user's")) is None
        one.announce(ValueError("a bug"))
        assert one.explain(BROKEN.__class__("unrelated")) is None


def test_the_first_reason_counts() -> None:
    with two_ranks() as (zero, one, _):
        one.announce(ValueError("the cause"))
        assert "the cause" in told(zero, BROKEN)
        zero.announce(RankError("a consequence"))
        assert "the cause" in told(zero, BROKEN)


def test_a_failure_that_the_ranks_agreed_on_ends_nobody_who_caught_it() -> None:
    with two_ranks() as (zero, one, _):
        one.announce(DataError("caught by whoever called"))
        assert "caught by" in told(zero, BROKEN)
        for watch in (zero, one):
            watch.withdraw()
            assert watch.explain(ValueError("of this rank's own")) is None
        one.announce(DataError("the next one"))
        assert "the next one" in told(zero, BROKEN)


def test_word_of_a_failure_that_comes_after_it_was_agreed_on_is_old_news() -> None:
    with two_ranks() as (zero, one, _):
        zero.withdraw()
        one.announce(DataError("old"))
        one.withdraw()
        one.announce(DataError("new"))
        assert "new" in told(zero, BROKEN)


def test_a_rank_that_is_gone_is_nothing_to_agree_on() -> None:
    with two_ranks() as (zero, _, line):
        zero.announce(DataError("caught by whoever called"))
        line.connection.shutdown(socket.SHUT_RDWR)
        time.sleep(0.5)
        zero.withdraw()
        assert told(zero, BROKEN).startswith("rank 1 is gone")


ENDED = """
import socket, sys, time
from lowpeak.watch.lines import Line
from lowpeak.watch.watch import Watch
with socket.create_server(("127.0.0.1", 0)) as server:
    there = socket.create_connection(server.getsockname())
    here, _ = server.accept()
with Watch(0, [Line(here, 1)], lambda: "phase train", grace=0.1):
    print("  0%|          | 3/900 [00:03<17:11, 1.15s/it, training]", end="", file=sys.stderr, flush=True)
    there.close()
    time.sleep(60)
"""


def test_the_sentence_of_a_rank_that_is_ended_is_a_line_by_itself_beside_an_open_progress_bar() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDED], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "lowpeak: error: rank 1 is gone (killed, or its host is lost). Rank 0 was in phase train and cannot go on "
        "without it."
    )

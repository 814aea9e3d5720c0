"""The failure detectors of two ranks in one process: their messages, and the errors that they explain."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from lowpeak.errors import DataError, RankError
from lowpeak.watchdog.connections import RankConnection
from lowpeak.watchdog.failure_detector import FailureDetector

BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:24223")


def ends():
    """Rank 0's connection to rank 1, and rank 1's to rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname(), timeout=5)
        here, _ = server.accept()
    return RankConnection(here, 1), RankConnection(there, 0)


@contextmanager
def two_ranks():
    """Both ranks' detectors, and rank 1's connection."""
    first, second = ends()
    with (
        FailureDetector(0, [first], lambda: "phase train", 60.0) as zero,
        FailureDetector(1, [second], lambda: "phase reward", 60.0) as one,
    ):
        yield zero, one, second


def verdict_of(watch):
    """The detector's explanation of a failed collective, once it knows of another rank's failure."""
    deadline = time.monotonic() + 5.0
    while (found := watch.explain(BROKEN)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return str(found)


@pytest.mark.parametrize("speaker", [0, 1])
def test_an_announced_error_explains_the_other_ranks_failure(speaker):
    with two_ranks() as (*watches, _):
        watches[speaker].announce(DataError("row 3."))
        where = ("phase train", "phase reward")
        sentence = verdict_of(watches[1 - speaker])
        assert sentence.startswith(f"rank {speaker} failed in {where[speaker]}: row 3. ")
        assert f"Rank {1 - speaker} was in {where[1 - speaker]}" in sentence


def test_a_rank_that_is_done_may_end_before_the_others():
    first, second = ends()
    with FailureDetector(0, [first], lambda: "phase train", 1.0) as zero:
        with FailureDetector(1, [second], lambda: "phase train", 1.0):
            pass
        assert zero.explain(ValueError("of this rank's own")) is None
        assert "ddp_timeout" in str(zero.explain(BROKEN))


def test_the_first_announced_error_counts_and_unrelated_errors_are_not_explained():
    with two_ranks() as (zero, one, _):
        assert zero.explain(ValueError("a bug of the user's")) is None
        one.announce(ValueError("cause"))
        assert one.explain(RuntimeError("unrelated")) is None
        assert "cause" in verdict_of(zero)
        zero.announce(RankError("consequence"))
        assert "cause" in verdict_of(zero)


def test_a_rank_continues_after_it_caught_an_agreed_error():
    with two_ranks() as (zero, one, _):
        one.announce(DataError("caught"))
        assert "caught" in verdict_of(zero)
        for watch in (zero, one):
            watch.withdraw()
            assert watch.explain(ValueError("of this rank's own")) is None
        zero.withdraw()
        one.announce(DataError("old"))  # rank 0 has agreed on it already
        one.withdraw()
        one.announce(DataError("new"))
        assert "new" in verdict_of(zero)


def test_a_dead_rank_is_the_reason_also_after_an_agreed_error():
    with two_ranks() as (zero, _, line):
        zero.announce(DataError("caught"))
        line.socket.shutdown(socket.SHUT_RDWR)
        time.sleep(0.5)
        zero.withdraw()
        assert verdict_of(zero).startswith("rank 1 ")


ENDED = """
import socket, sys, time
from lowpeak.watchdog.connections import RankConnection
from lowpeak.watchdog.failure_detector import FailureDetector
with socket.create_server(("127.0.0.1", 0)) as server:
    there = socket.create_connection(server.getsockname())
    here, _ = server.accept()
with FailureDetector(0, [RankConnection(here, 1)], lambda: "phase train", grace=0.1):
    print("  0%|          | 3/900 [00:03<17:11, 1.15s/it, training]", end="", file=sys.stderr, flush=True)
    there.close()
    time.sleep(60)
"""


def test_a_lost_connection_is_not_announced_before_the_rank_that_is_gone_is_known():
    with two_ranks() as (zero, _, line):
        zero.announce(BROKEN)
        line.socket.shutdown(socket.SHUT_RDWR)
        assert verdict_of(zero).startswith("rank 1 is gone")


def test_the_message_of_an_ended_rank_starts_on_a_new_line_after_a_progress_bar():
    ended = subprocess.run([sys.executable, "-c", ENDED], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("lowpeak: error: rank 1 ")

"""Several engines are asked at the same time, and Ctrl-C waits for none of them."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from lowpeak.rollout.vllm.at_once import at_once


def test_calls_are_under_way_together_and_answer_in_order():
    meeting = threading.Barrier(2, timeout=10)

    def call(number):
        meeting.wait()
        return number

    assert at_once([lambda: call(1), lambda: call(2)]) == [1, 2]
    assert at_once([]) == []


def test_a_single_call_is_made_in_the_thread_that_asks():
    assert at_once([threading.current_thread]) == [threading.current_thread()]


def test_the_first_error_is_raised_when_all_have_ended():
    ended = threading.Event()

    def late():
        time.sleep(0.05)
        ended.set()
        raise ValueError("second")

    def early():
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        at_once([early, late])
    assert ended.is_set()


def test_ctrl_c_does_not_wait_for_calls_that_hang():
    hanging = threading.Event()
    here = threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    threading.Timer(0.1, signal.pthread_kill, (here, signal.SIGINT)).start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            at_once([lambda: hanging.wait(10)] * 2)
    finally:
        hanging.set()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 5

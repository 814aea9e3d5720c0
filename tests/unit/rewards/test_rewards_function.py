"""Function rewards: keywords by signature, names, sync and async calls, time limits."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import re
import threading
import time

import pytest

from lowpeak.errors import ArgumentError, RewardError, RewardTimeoutError
from lowpeak.rewards.function import BackgroundLoop, FunctionReward, TimeLimitExceeded, call_with_timeout
from lowpeak.rewards.reward import Reward

ROWS = {"prompts": ["p", "p"], "completions": ["a", "bb"], "completion_ids": [[1], [2, 2]]}


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


async def later(completions, **kwargs):
    await asyncio.sleep(0.001)
    return length(completions)


class ExactAnswer:
    def __call__(self, completions, answer):
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


class AsyncLength:
    async def __call__(self, completions, **kwargs):
        return await later(completions)


@pytest.mark.parametrize(
    ("function", "name", "is_async"),
    [
        (length, "length", False),
        (later, "later", True),
        (ExactAnswer(), "ExactAnswer", False),
        (AsyncLength(), "AsyncLength", True),
        (functools.partial(functools.partial(length), answer=1), "length", False),
        (functools.partial(later), "later", True),
        (functools.partial(AsyncLength()), "AsyncLength", True),
    ],
)
def test_callables_of_each_kind_have_a_name_and_are_called_alike(function, name, is_async):
    reward = FunctionReward(function)
    assert (reward.name, reward.is_async) == (name, is_async)
    assert reward(**ROWS, answer=["a", "b"]) == [1.0, 0.0 if name == "ExactAnswer" else 2.0]
    assert FunctionReward(function, name="mine").name == "mine"
    assert isinstance(reward, Reward)


def test_a_function_with_kwargs_gets_every_keyword_and_one_without_only_those_it_names():
    seen = []
    columns = {"answer": ["a", "b"], "trainer_state": "state", "log_extra": print}
    FunctionReward(lambda **kwargs: seen.append(set(kwargs)))(**ROWS, **columns)
    FunctionReward(lambda completions, answer=None, level=3: seen.append((answer, level)))(**ROWS, **columns)
    assert seen == [{*ROWS, *columns}, (["a", "b"], 3)]
    assert FunctionReward(ExactAnswer())(**ROWS, **columns) == [1.0, 0.0]
    assert FunctionReward(functools.partial(dict))(**ROWS, answer=[1]) == {**ROWS, "answer": [1]}  # without a signature


def test_a_parameter_that_nothing_fills_is_named_with_what_there_is():
    with pytest.raises(RewardError, match=r"'ExactAnswer' .*answer.*level"):
        FunctionReward(ExactAnswer())(**ROWS, level=[1, 2])


@pytest.mark.parametrize("function", [3, ExactAnswer, "length"])
def test_what_cannot_be_asked_is_refused(function):
    with pytest.raises(ArgumentError, match=re.escape(repr(function))):
        FunctionReward(function)


def test_a_late_function_is_left_behind_or_cancelled():
    released, ended = threading.Event(), []

    async def slow(**kwargs):
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    start = time.perf_counter()
    for function in (lambda **kwargs: released.wait(30), slow):
        with pytest.raises(RewardTimeoutError, match=r"'slow' .*0\.05"):
            FunctionReward(function, name="slow", timeout=0.05)(**ROWS)
    assert time.perf_counter() - start < 5
    assert ended == [True]
    released.set()


def test_a_timeout_of_the_functions_own_is_not_taken_for_the_limit():
    def sync(**kwargs):
        raise TimeoutError("server")

    async def asynchronous(**kwargs):
        sync()

    for function in (sync, asynchronous):
        with pytest.raises(TimeoutError, match="server") as caught:
            FunctionReward(function, timeout=30)(**ROWS)
        assert not isinstance(caught.value, RewardError)


def test_a_call_with_a_limit_sees_the_callers_context():
    word: contextvars.ContextVar[str] = contextvars.ContextVar("word")
    word.set("here")
    assert call_with_timeout(word.get, 30) == "here"


def test_the_background_loop_is_kept_until_it_was_blocked_and_ends_with_its_owner():
    loop, released = BackgroundLoop(), threading.Event()

    async def running():
        return asyncio.get_running_loop()

    async def blocks():
        released.wait(30)

    first = loop.run(running())
    assert loop.run(running()) is first
    with pytest.raises(TimeLimitExceeded):
        loop.run(blocks(), 0.05)
    second = loop.run(running(), 30)
    released.set()
    assert second is not first
    del loop
    deadline = time.monotonic() + 10
    while not second.is_closed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert second.is_closed()

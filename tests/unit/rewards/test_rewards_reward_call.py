"""A failing reward: an error that names the reward and the completion, or None and a count."""

from __future__ import annotations

import asyncio
import json
import linecache
import logging
import math
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from panel_groups import compute_rewards, group, panel

from lowpeak.errors import RewardError, RewardTimeoutError

NAN, INF = float("nan"), float("inf")


def bad(returned):
    """Return a reward named `bad` that returns this value."""

    def bad(completions, **kwargs):
        return returned

    return bad


INDEX_1 = "index 1 (completion 1 of group 0: 'bb')"
INDEX_2 = "index 2 (completion 0 of group 1: 'ccc')"


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ([1.0, 2.0], ["2", "4"]),
        (torch.zeros(5), ["5", "4"]),
        (None, ["None", "NoneType"]),
        (1.0, ["1.0", "float"]),
        (torch.tensor(1.0), ["tensor(1.)", "Tensor"]),
        ("1234", ["'1234'", "str"]),
        ({1: 1, 2: 2, 3: 3, 4: 4}, ["dict"]),
        ((x for x in range(4)), ["generator"]),
        ([0, 0, NAN, 0], ["nan", INDEX_2]),
        ([0, INF, 0, 0], ["inf", INDEX_1]),
        (torch.tensor([0, 0, 0, -INF]), ["-inf", "index 3"]),
        (["1", 0, 0, 0], ["'1'", "str", "index 0"]),
        (torch.zeros(4, 1), ["1", "2", "completion_ids", INDEX_1]),
        ([0, 1j, 0, 0], ["1j", "complex", INDEX_1]),
        ([0, torch.zeros(1), 0, 0], ["1", "2", "completion_ids", INDEX_1]),
        ([[INF], 0, 0, 0], ["inf", "index 0"]),
        ([["1"], 0, 0, 0], ["'1'", "str", "index 0"]),
        ([10**400, 0, 0, 0], ["index 0"]),
        ([0, 3e38, 0, -3e38], ["3e+38", "fp32", INDEX_1]),
        ([0, 1e308, 0, 0], ["1e+308", "fp32", INDEX_1]),
    ],
)
def test_what_is_not_one_number_or_none_per_completion_is_told_with_its_row_and_value(returned, named):
    with pytest.raises(RewardError) as caught:
        compute_rewards(bad(returned))
    assert [each for each in ["'bad'", *named] if each not in str(caught.value)] == []


def divides(completions):
    return [1 / (len(text) - len(text)) for text in completions]


async def parses(completions):
    return [json.loads(text) for text in completions]


def logs_a_word(completions, log_metric, **kwargs):
    log_metric("seen", "many")


def logs_lowpeaks_metric(completions, log_metric, **kwargs):
    log_metric("completions/mean_length", 1.0)


def logs_without_a_name(completions, log_metric, **kwargs):
    log_metric(None, 1.0)


def leaves(completions):
    sys.exit(0)


async def leaves_later(completions):
    await asyncio.sleep(0), sys.exit(0)


async def leaves_in_a_task(completions):
    await asyncio.gather(*(leaves_later([completion]) for completion in completions))


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize(
    ("reward", "at", "words", "cause"),
    [
        (divides, divides, "ZeroDivisionError: ", ZeroDivisionError),
        (parses, parses, "JSONDecodeError: ", json.JSONDecodeError),
        (logs_a_word, logs_a_word, "ValueError: .*many", ValueError),
        (logs_lowpeaks_metric, logs_lowpeaks_metric, "'completions/mean_length'.*does not log", ValueError),
        (logs_without_a_name, logs_without_a_name, "None.*must be text", ValueError),
        (leaves, leaves, "SystemExit: 0", SystemExit),
        (leaves_later, leaves_later, "SystemExit: 0", SystemExit),
        (leaves_in_a_task, leaves_later, "SystemExit: 0", SystemExit),
    ],
)
def test_an_exception_or_exit_is_told_with_the_rewards_own_line_and_kept_as_the_cause(
    reward, at, words, cause, timeout
):
    line = at.__code__.co_firstlineno + 1
    source = re.escape(linecache.getline(__file__, line).strip())
    pattern = rf"'{reward.__name__}' .*{words}.* \({Path(__file__)}, line {line}: {source}\)"
    reward_panel = panel(reward, timeout=timeout)
    for _ in range(2):
        with pytest.raises(RewardError, match=pattern) as caught:
            reward_panel.compute_rewards([group("p", "a", "b")])
        error = caught.value.__cause__
        assert isinstance(error, cause)
        assert error.__traceback__.tb_frame.f_code is reward.__code__  # no frame of lowpeak comes first


def logs_too_few(completions, log_extra, **kwargs):
    log_extra("seen", [1])
    return [0] * len(completions)


def huge(completions):
    return [1e19, 0, 0, 0]


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([logs_too_few], r"'logs_too_few' .*1 .*'seen' .*4"),
        ([huge, huge], r"2e\+19 .*index 0 .*reward_weights"),
    ],
    ids=["log", "infinite square of the sum"],
)
def test_a_failure_around_the_values_is_told_with_its_name_and_number(rewards, words):
    with pytest.raises(RewardError, match=words):
        compute_rewards(*rewards)


@pytest.mark.parametrize("blocks", [False, True], ids=["awaits", "blocks its loop"])
def test_an_async_reward_past_the_limit_is_an_error_and_the_others_count(blocks):
    released = threading.Event()

    async def late(completions):
        if blocks:
            released.wait(30)
        await asyncio.sleep(30)

    async def quick(completions):
        return [1.0] * len(completions)

    start = time.perf_counter()
    result = compute_rewards(quick, late, timeout=0.05, on_failure="none")
    assert time.perf_counter() - start < 10
    assert [record.reward for record in result.records] == [1.0] * 4
    assert result.metrics["rewards/late/failed"].value() == 4
    with pytest.raises(RewardTimeoutError, match="'late'" if blocks else r"'late' .*0\.05"):
        compute_rewards(quick, late, timeout=0.05)
    released.set()


def test_a_sync_failure_spares_the_later_rewards_their_call():
    called = []

    async def costly(completions):
        called.append(True)
        return [0] * len(completions)

    with pytest.raises(RewardError, match="'bad'"):
        compute_rewards(costly, bad(None))
    assert called == []


@pytest.mark.parametrize(
    ("returned", "failed"),
    [([1.0, NAN, None, "x"], 2), ([1.0, INF, None, None], 1), ([1.0] * 3, 4), (None, 4)],
    ids=["rows", "inf", "length", "no list"],
)
def test_failures_count_as_none_where_that_is_asked_for(returned, failed):
    result = compute_rewards(bad(returned), on_failure="none")
    rewards = [record.reward for record in result.records]
    assert [math.isnan(reward) for reward in rewards] == [failed == 4, True, True, True]
    assert result.metrics["rewards/bad/failed"].value() == failed
    assert result.metrics["rewards/bad/failed"].kind == "sum"


def test_an_exception_counts_for_every_row_and_its_half_written_log_is_dropped(caplog):
    def breaks(completions, log_extra, log_metric, **kwargs):
        log_extra("seen", completions)
        log_metric("seen", 1)
        raise OSError("no server")

    with caplog.at_level(logging.WARNING, logger="lowpeak"):
        result = compute_rewards(breaks, lambda prompts: [1] * 4, on_failure="none")
    assert [record.reward for record in result.records] == [1.0] * 4
    assert result.metrics["rewards/breaks/failed"].value() == 4
    assert result.metrics["rewards/<lambda>/failed"].value() == 0
    assert result.extra == {}
    assert "seen" not in result.metrics
    # asyncio may log the tasks of an earlier test's stopped loop when they are collected.
    (warning,) = [record for record in caplog.records if record.name.startswith("lowpeak")]
    assert [each for each in ("'breaks'", "OSError") if each not in str(warning.args[0])] == []
    assert warning.args[1:] == (4, 4)


def test_ctrl_c_inside_a_reward_is_no_failure():
    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_rewards(interrupted, on_failure="none")

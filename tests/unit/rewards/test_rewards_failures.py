"""A failing reward is one clear error that names it and its row, or None for the rows it concerns, counted."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from panel_groups import group, judge, panel

from lowpeak.errors import RewardError, RewardTimeoutError

NAN, INF = float("nan"), float("inf")


def bad(returned):
    """A reward named `bad` that returns this."""

    def bad(completions, **kwargs):
        return returned

    return bad


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0, 2.0], "'bad' returned 2 values for 4 completions; return one per completion"),
        (torch.zeros(5), "'bad' returned 5 values for 4 completions"),
        (None, "'bad' returned None of type NoneType; return a list"),
        (1.0, "'bad' returned 1.0 of type float; return a list"),
        (torch.tensor(1.0), r"'bad' returned tensor\(1.\) of type Tensor; return a list"),
        ("1234", "'bad' returned '1234' of type str; return a list"),
        ({1: 1, 2: 2, 3: 3, 4: 4}, "of type dict; return a list"),
        ((x for x in range(4)), "of type generator; return a list"),
        (
            [0, 0, NAN, 0],
            r"'bad' returned nan for row 2 \(completion 0 of group 1: 'ccc'\); return a finite number, or None",
        ),
        ([0, INF, 0, 0], r"'bad' returned inf for row 1 \(completion 1 of group 0: 'bb'\)"),
        (torch.tensor([0, 0, 0, -INF]), r"'bad' returned -inf for row 3"),
        (["1", 0, 0, 0], r"'bad' returned '1' of type str for row 0"),
        (torch.zeros(4, 1), r"'bad' returned 1 numbers for 2 tokens \(completion_ids has them\) for row 1"),
        ([0, 1j, 0, 0], "1j of type complex for row 1"),
        ([0, torch.zeros(1), 0, 0], r"'bad' returned 1 numbers for 2 tokens"),
        ([[INF], 0, 0, 0], r"'bad' returned inf for row 0"),
        ([["1"], 0, 0, 0], r"'bad' returned '1' of type str for row 0"),
        ([10**400, 0, 0, 0], "a number too large for a float for row 0"),
        ([0, 3e38, 0, -3e38], r"'bad' returned 3e\+38, whose square is infinite in fp32, for row 1"),
        ([0, 1e308, 0, 0], r"'bad' returned 1e\+308, whose square is infinite in fp32, for row 1"),
    ],
)
def test_what_is_not_one_number_or_none_per_completion_is_an_error(returned, words):
    with pytest.raises(RewardError, match=words):
        judge(bad(returned))


def test_an_exception_is_told_with_its_file_and_line_and_kept_as_the_cause():
    def divides(completions):
        return [1 / len(text) for text in completions]

    line = divides.__code__.co_firstlineno + 1
    with pytest.raises(RewardError) as caught:
        judge(divides)
    assert (
        str(caught.value) == f"Reward 'divides' raised ZeroDivisionError: division by zero ({__file__}, line {line})."
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exception_deep_in_a_library_is_told_with_the_rewards_own_line():
    async def parses(completions):
        return [json.loads(text) for text in completions]

    line = parses.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=f"JSONDecodeError: .* \\({Path(__file__)}, line {line}\\)"):
        judge(parses)


def leaves(completions):
    sys.exit(0)


async def leaves_later(completions):
    await asyncio.sleep(0)
    sys.exit(0)


async def leaves_in_a_task(completions):
    await asyncio.gather(*(leaves_later([completion]) for completion in completions))


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("reward", [leaves, leaves_later, leaves_in_a_task])
def test_a_reward_that_exits_is_a_failure_of_the_reward(reward, timeout):
    line = (leaves if reward is leaves else leaves_later).__code__.co_firstlineno
    words = rf"Reward '{reward.__name__}' raised SystemExit: 0 \({Path(__file__)}, line {line + 1 + (reward is not leaves)}\)"
    judges = panel(reward, timeout=timeout)
    for _ in range(2):
        with pytest.raises(RewardError, match=words):
            judges.judge([group("p", "a", "b")])


def test_rewards_whose_weighted_sum_is_infinite_in_fp32_are_an_error():
    with pytest.raises(
        RewardError, match=r"The weighted sum of the rewards is 2e\+19 for row 0 .*: lower reward_weights"
    ):
        judge(lambda completions: [1e19, 0, 0, 0], lambda completions: [1e19, 0, 0, 0])


def test_a_missing_column_is_told_by_name():
    with pytest.raises(RewardError, match="'needs' asks for answer, which the data set has no column for"):
        judge(lambda completions: [0] * 4, needs)


def needs(completions, answer):
    return [0.0] * len(completions)


def test_a_sync_reward_past_the_panels_limit_is_an_error():
    released = threading.Event()

    def waits(completions):
        released.wait(30)

    with pytest.raises(RewardTimeoutError, match=r"'waits' did not return within its time limit of 0\.05 seconds"):
        judge(waits, timeout=0.05)
    released.set()


def test_an_async_reward_past_the_panels_limit_is_an_error_and_the_others_count():
    async def waits(completions):
        await asyncio.sleep(30)

    async def quick(completions):
        return [1.0] * len(completions)

    with pytest.raises(RewardTimeoutError, match=r"'waits' did not return within its time limit of 0\.05 seconds"):
        judge(quick, waits, timeout=0.05)
    judged = judge(quick, waits, timeout=0.05, on_failure="none")
    assert [record.reward for record in judged.records] == [1.0] * 4
    assert judged.metrics["rewards/waits/failed"].value() == 4


def test_an_async_reward_that_blocks_its_loop_is_found_too():
    released = threading.Event()

    async def blocks(completions):
        released.wait(30)

    async def quick(completions):
        return [1.0] * len(completions)

    start = time.perf_counter()
    judges = panel(quick, blocks, timeout=0.05, on_failure="none")
    judged = judges.judge([group("p", "a")])
    assert time.perf_counter() - start < 10
    assert judged.records[0].reward == 1.0
    assert judged.metrics["rewards/blocks/failed"].value() == 1
    with pytest.raises(RewardTimeoutError, match="Async reward 'blocks' blocks its event loop past its time limit"):
        judge(quick, blocks, timeout=0.05)
    released.set()


def test_a_column_logged_with_too_few_values_is_an_error():
    def logs(completions, log_extra, **kwargs):
        log_extra("seen", [1])
        return [0] * len(completions)

    with pytest.raises(RewardError, match="'logs' logged 1 values in column 'seen' for 4 completions"):
        judge(logs)


def test_a_metric_that_is_no_number_is_an_error_in_the_rewards_own_line():
    def logs(completions, log_metric, **kwargs):
        log_metric("seen", "many")
        return [0] * len(completions)

    line = logs.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=f"'logs' raised ValueError: .*many.*, line {line}\\)"):
        judge(logs)


def test_a_sync_failure_spares_the_later_rewards_their_call():
    called = []

    async def costly(completions):
        called.append(True)
        return [0] * len(completions)

    with pytest.raises(RewardError, match="'bad'"):
        judge(costly, bad(None))
    assert called == []


@pytest.mark.parametrize(
    ("returned", "failed"),
    [([1.0, NAN, None, "x"], 2), ([1.0, INF, None, None], 1), ([1.0] * 3, 4), (None, 4)],
    ids=["rows", "inf", "length", "no list"],
)
def test_failures_count_as_none_where_that_is_asked_for(returned, failed):
    judged = judge(bad(returned), on_failure="none")
    rewards = [record.reward for record in judged.records]
    assert [math.isnan(reward) for reward in rewards] == [failed == 4, True, True, True]
    assert judged.metrics["rewards/bad/failed"].value() == failed
    assert judged.metrics["rewards/bad/failed"].kind == "sum"


def test_an_exception_counts_for_every_row_and_its_half_written_log_is_dropped(caplog):
    def breaks(completions, log_extra, log_metric, **kwargs):
        log_extra("seen", completions)
        log_metric("seen", 1)
        raise OSError("no judge")

    with caplog.at_level(logging.WARNING, logger="lowpeak"):
        judged = judge(breaks, lambda prompts: [1] * 4, on_failure="none")
    assert [record.reward for record in judged.records] == [1.0] * 4
    assert judged.metrics["rewards/breaks/failed"].value() == 4
    assert judged.metrics["rewards/<lambda>/failed"].value() == 0
    assert judged.columns == {}
    assert "seen" not in judged.metrics
    assert "'breaks' raised OSError: no judge" in caplog.text
    assert "4 of 4 rows" in caplog.text


def test_without_the_option_nothing_is_counted_as_failed():
    assert "rewards/<lambda>/failed" not in judge(lambda prompts: [0] * 4).metrics


def test_ctrl_c_inside_a_reward_is_no_failure():
    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(interrupted, on_failure="none")

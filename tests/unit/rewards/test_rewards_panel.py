"""The panel calls each reward once for complete groups, and returns records with their values."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from panel_groups import completion, compute_rewards, decode, group, panel

from lowpeak.errors import ArgumentError
from lowpeak.records import Group, Prompt
from lowpeak.rewards.function import FunctionReward
from lowpeak.rewards.panel import RewardPanel, RewardSettings, metrics_by_function

NAN = float("nan")


def length(completions, **kwargs):
    return [len(text) for text in completions]


def only_long(completions, **kwargs):
    return [1.0 if len(text) > 1 else None for text in completions]


def call_panel(*groups, trainer_state=None):
    """Return the keywords of a call."""
    seen = {}
    spy = panel(lambda **kwargs: seen.update(kwargs) or [0] * len(kwargs["prompts"]))
    spy.compute_rewards(groups, trainer_state=trainer_state)
    return seen


def test_plain_groups_are_strings_in_rows_with_every_column_and_the_trainers_state():
    seen = call_panel(group("p", "a", "bb", answer=1), group("q", "c", answer=2), trainer_state="state")
    assert seen.pop("log_extra")
    assert seen.pop("log_metric")
    assert seen == {
        "prompts": ["p", "p", "q"],
        "completions": ["a", "bb", "c"],
        "completion_ids": [[97], [98, 98], [99]],
        "answer": [1, 1, 2],
        "trainer_state": "state",
    }
    assert all(type(token) is int for ids in seen["completion_ids"] for token in ids)


@pytest.mark.parametrize("assistant_prefix", ["", "<think>"])
def test_conversational_groups_are_lists_of_one_message_with_what_it_continues(assistant_prefix):
    prompt = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "<think>"}]
    one = group(prompt, "a", "b")
    seen = call_panel(replace(one, prompt=replace(one.prompt, assistant_prefix=assistant_prefix)))
    assert seen["prompts"] == [prompt, prompt]
    assert seen["completions"] == [[{"role": "assistant", "content": f"{assistant_prefix}{text}"}] for text in "ab"]


def test_a_column_that_a_prompt_lacks_is_none_and_a_completions_own_field_comes_first():
    seen = call_panel(
        group("p", completion("a", score=5), "b", score=1, level=2), group("q", "c", prompt="x", completion_ids=3)
    )
    assert (seen["score"], seen["level"]) == ([5, 1, None], [2, 2, None])
    assert "prompt" not in seen
    assert seen["completion_ids"] == [[97], [98], [99]]


def test_one_reward_that_empties_its_lists_leaves_the_others_theirs():
    def greedy(prompts, completions, answer, **kwargs):
        prompts.clear(), completions.clear(), answer.clear()
        return [0.0] * 2

    def exact(completions, answer):
        return [len(text) + number for text, number in zip(completions, answer, strict=True)]

    result = compute_rewards(greedy, exact, greedy, groups=[group("p", "a", "bb", answer=1)])
    assert [record.rewards for record in result.records] == [(0, 2, 0), (0, 3, 0)]


def test_records_stand_in_row_order_with_their_group_their_prompt_and_their_weighted_reward():
    groups = [group("p", "a", completion("bb", prompt_ids=(9,))), group("q", "ccc")]
    result = panel(length, only_long, weights=(0.5, 2.0)).compute_rewards(groups)
    assert [record.group for record in result.records] == [0, 0, 1]
    assert [record.prompt_ids for record in result.records] == [(7, 8), (9,), (7, 8)]
    assert [record.completion for record in result.records] == [c for g in groups for c in g.completions]
    assert [record.reward for record in result.records] == [0.5, 3.0, 3.5]
    assert result.records[2].rewards == (3.0, 1.0)
    assert math.isnan(result.records[0].rewards[1])
    assert result.completions == ("a", "bb", "ccc")


def test_a_row_that_nobody_scored_has_no_reward_and_one_scored_zero_has():
    result = compute_rewards(only_long, lambda completions: [None, None, 0, None], weights=(3.0, 1.0))
    assert [record.reward for record in result.records] == pytest.approx([NAN, 3.0, 3.0, NAN], nan_ok=True)
    assert compute_rewards(lambda prompts: [None, 0, 0, 0]).records[1].reward == 0.0


def test_a_row_whose_tokens_have_a_number_each_has_their_sum_and_their_weighted_numbers():
    result = compute_rewards(lambda completions: [1, [0.5, None], torch.ones(3), []], length, weights=(2.0, 1.0))
    assert [record.rewards[0] for record in result.records] == [1, 0.5, 3, 0]
    tokens = [None if each.token_rewards is None else each.token_rewards.tolist() for each in result.records]
    assert tokens == [None, [1.0, 0.0], [2.0, 2.0, 2.0], None]


def no_number(prompts):
    return [None] * len(prompts)


def test_means_and_stds_are_over_the_rows_that_were_scored_as_in_trl_also_if_ranks_scored_them():
    functions, groups = (length, only_long, no_number), [group("p", "a", "bb"), group("q", "ccc", "")]
    metrics, names = compute_rewards(*functions, groups=groups).metrics, ("length", "only_long", "no_number")
    found = [metrics[f"rewards/{name}/{kind}"].value() for name in names for kind in ("mean", "std")]
    std = torch.tensor([1.0, 2, 3, 0]).std().item()
    assert found == pytest.approx([1.5, std, 1.0, 0.0, NAN, NAN], nan_ok=True)
    gathered = [record for own in groups for record in compute_rewards(*functions, groups=[own]).records]
    assert metrics_by_function(names, gathered) == metrics


def test_rewards_log_metrics_and_columns():
    def logs(completions, log_extra, log_metric, **kwargs):
        for half in (completions[:2], completions[2:]):
            log_extra("first", [text[:1] for text in half])
        log_metric("parsed", 1.0)
        log_metric("parsed", torch.tensor(0.0))
        return length(completions)

    def logs_too(completions, log_extra, log_metric, **kwargs):
        log_extra("first", [0, 1, 2, 3])
        log_metric("parsed", 2)
        return length(completions)

    result = compute_rewards(logs, logs_too)
    assert result.extra == {"first": ["a", "b", "c", ""], "logs_too/first": [0, 1, 2, 3]}
    assert result.metrics["parsed"].value() == 1.0


@pytest.mark.parametrize(
    "values",
    [
        (1, 0, True, False),
        [np.float32(1), np.int64(0), np.bool_(True), np.array(0.0)],
        [torch.tensor(1), torch.tensor(0.0, dtype=torch.bfloat16), torch.tensor(True), 0],
        [Fraction(1), Decimal(0), 1.0, 0.0],
        torch.tensor([1, 0, 1, 0], dtype=torch.bfloat16),
        np.array([True, False, True, False]),
    ],
    ids=["tuple", "numpy scalars", "torch scalars", "exact numbers", "tensor", "array"],
)
def test_numbers_of_every_usual_kind_are_rewards(values):
    records = compute_rewards(lambda prompts: values).records
    assert [record.reward for record in records] == [1.0, 0.0, 1.0, 0.0]
    assert all(type(record.reward) is float for record in records)


def test_async_rewards_wait_for_each_other_and_sync_ones_run_in_the_callers_thread():
    met, caller = asyncio.Barrier(2), threading.current_thread()

    async def meet(completions, **kwargs):
        await asyncio.wait_for(met.wait(), 10)
        return length(completions)

    def sync(completions):
        assert threading.current_thread() is caller
        return length(completions)

    result = compute_rewards(meet, sync, meet)
    assert [record.rewards for record in result.records] == [(1, 1, 1), (2, 2, 2), (3, 3, 3), (0, 0, 0)]


def test_async_rewards_run_where_a_loop_is_running_and_their_client_lives_from_one_call_to_the_next():
    loops = []

    async def client(completions):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return length(completions)

    async def notebook():
        reward_panel = panel(client)
        return [reward_panel.compute_rewards([group("p", "a", "bb")]) for _ in range(2)]

    result = asyncio.run(notebook())
    assert [[record.reward for record in each.records] for each in result] == [[1, 2]] * 2
    assert loops[0] is loops[1]


def test_a_functions_own_limit_comes_before_the_panels():
    def takes(prompts):
        time.sleep(0.2)
        return [0.0] * len(prompts)

    settings = RewardSettings((1.0,), timeout=0.05)
    result = RewardPanel([FunctionReward(takes, timeout=30)], settings, decode).compute_rewards([group("p", "a")])
    assert result.records[0].reward == 0.0


def test_two_rewards_of_one_name_have_metrics_of_their_own():
    rewards = [FunctionReward(length, name) for name in ("r", "r_2", "r", "r")]
    reward_panel = RewardPanel(rewards, RewardSettings((1.0,) * 4), decode)
    assert reward_panel.names == ("r", "r_2", "r_3", "r_4")
    assert [reward.name for reward in rewards] == ["r", "r_2", "r", "r"]
    assert "rewards/r_4/mean" in reward_panel.compute_rewards([group("p", "a")]).metrics


def test_no_rows_are_no_call():
    called = []

    def never(**kwargs):
        called.append(kwargs)
        return []

    for groups in ([], [Group(Prompt(0, (1,), "p"), ())]):
        result = panel(never, on_failure="none").compute_rewards(groups)
        assert (result.records, result.extra, result.completions) == ((), {}, ())
        assert result.metrics["rewards/never/mean"].count == 0
        assert result.metrics["rewards/never/failed"].value() == 0
    assert called == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: panel(length, weights=(1.0, 2.0)), "2 .*1 "),
        (lambda: RewardSettings((1.0, float("nan"))), "nan"),
        (lambda: RewardSettings((1.0,), timeout=0), " 0 "),
        (lambda: RewardSettings((1.0,), on_failure="ignore"), "'ignore'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()

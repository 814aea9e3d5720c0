"""A pairwise judge as a reward: shares of comparisons, balanced positions, validated verdicts."""

from __future__ import annotations

import asyncio

import pytest
from panel_groups import compute_rewards, group

from lowpeak.errors import ArgumentError, RewardError
from lowpeak.rewards.judge import JudgeReward, resolve_reward_funcs
from preference_data import ScriptedJudge

NAN = float("nan")


def length(prompt, text):
    return len(text)


def compare(judge, *groups, **settings):
    return compute_rewards(*resolve_reward_funcs(None, judge), groups=groups, **settings)


def rewards(judge, *groups, **settings):
    return [record.reward for record in compare(judge, *groups, **settings).records]


class ConstantJudge:
    """A judge whose verdicts depend on the number of pairs alone."""

    def __init__(self, verdicts):
        self.verdicts = verdicts

    def judge(self, prompts, completions):
        return self.verdicts(len(prompts))


ONE_PAIR = [group("p", "a", "bb")]


@pytest.mark.parametrize(
    ("groups", "shares", "num_asked"),
    [
        ([group("p", "a", "bbb"), group("q", "cc", "d")], [0.0, 1.0, 1.0, 0.0], 2),
        ([group("p", "a", "bbb", "cc", "dd"), group("p", "zzzzzz", "z")], [0.0, 1.0, 0.5, 0.5, 1.0, 0.0], 7),
        ([group("p", "a", "a"), group("q", "a", "a", "bb")], [0.5, 0.5, 0.25, 0.25, 1.0], 2),
        ([group("p", "a"), group("q", "b")], [NAN, NAN], 0),
        ([group("p", "a", "bb", groups=1), group("q", "cccc", "d", groups=1)], [0, 1, 1, 0], 2),
    ],
    ids=["pairs", "larger groups", "equal texts", "alone", "a column named groups"],
)
def test_a_reward_is_the_share_of_comparisons_within_the_group(groups, shares, num_asked):
    judge = ScriptedJudge(length)
    assert rewards(judge, *groups) == pytest.approx(shares, nan_ok=True)
    assert len(judge.requests) == num_asked


def test_no_preference_is_half_a_win_for_both_and_logged():
    assert rewards(ConstantJudge(lambda n: [-1] * n), *ONE_PAIR) == [0.5, 0.5]
    result = compare(ScriptedJudge(length), group("p", "a", "b"), *ONE_PAIR)
    assert result.metrics["judge/no_preference"].value() == 0.5


def test_the_place_of_a_completion_is_told_by_the_texts_and_evens_out():
    first = ConstantJudge(lambda n: [0] * n)
    groups = [group(f"p{i}", f"a{i}", f"b{i}") for i in range(400)]
    found = rewards(first, *groups)
    assert found == rewards(first, *groups)
    assert 150 < sum(found[::2]) < 250
    assert rewards(first, *groups[7:])[:2] == found[14:16]


def test_messages_are_read_as_text():
    parts = [{"type": "text", "text": "hi"}]
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": parts}]
    judge = ScriptedJudge(length)
    rewards(judge, group(messages, "a", "bb"))
    ((prompt, pair),) = judge.requests
    assert (prompt, sorted(pair)) == ("system: be short\n\nuser: hi", ["a", "bb"])


def test_an_async_judge_of_trls_shape_is_waited_for_and_asked_in_our_order():
    class Waiting(ScriptedJudge):
        async def judge(self, prompts, completions, shuffle_order=True):
            assert not shuffle_order
            await asyncio.sleep(0.01)
            return super().judge(prompts, completions)

    assert rewards(Waiting(length), group("p", "a", "bb")) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda n: [0] * (n + 1), r"\[0, 0\].* 1 "),
        (lambda n: None, "None"),
        (lambda n: [2] * n, " 2 "),
        (lambda n: ["first"] * n, "'first'"),
    ],
)
def test_an_answer_that_is_none_is_told(answer, words):
    with pytest.raises(RewardError, match=words):
        rewards(ConstantJudge(answer), *ONE_PAIR)


def test_pairs_come_from_rewards_or_from_a_judge():
    judge = ScriptedJudge(length)
    assert resolve_reward_funcs(length, None) is length
    assert isinstance(resolve_reward_funcs([], judge)[0], JudgeReward)
    with pytest.raises(ArgumentError, match="reward_funcs"):
        resolve_reward_funcs([length], judge)


@pytest.mark.parametrize("judge", [length, ScriptedJudge, object()])
def test_what_has_no_judge_is_no_judge(judge):
    with pytest.raises(ArgumentError, match=r"judge\(prompts, completions\)"):
        JudgeReward(judge)

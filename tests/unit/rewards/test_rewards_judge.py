"""A judge of pairs as a reward: shares of comparisons, places that even out, answers that are checked."""

from __future__ import annotations

import asyncio
import time

import pytest
from panel_groups import decode, group

from lowpeak.errors import ArgumentError, RewardError
from lowpeak.rewards.combine import RewardPanel, RewardSettings
from lowpeak.rewards.judge import Contest, JudgeReward, PairwiseJudge, ScriptedJudge, rewards_or_judge, transcript
from lowpeak.rewards.make import make_rewards


def length(prompt, text):
    return len(text)


def judged(judge, *groups, **settings):
    panel = RewardPanel(make_rewards(rewards_or_judge(None, judge)), RewardSettings((1.0,), **settings), decode)
    return panel.judge(groups)


def rewards(judge, *groups, **settings):
    return [record.reward for record in judged(judge, *groups, **settings).records]


class Answering:
    """Says the same whatever it is asked."""

    def __init__(self, answer):
        self.answer = answer

    def judge(self, prompts, completions):
        return self.answer(len(prompts))


def test_of_two_the_better_one_has_1_and_the_other_0():
    assert rewards(ScriptedJudge(length), group("p", "a", "bbb"), group("q", "cc", "d")) == [0.0, 1.0, 1.0, 0.0]


def test_a_reward_is_the_share_of_comparisons_within_the_group():
    found = rewards(ScriptedJudge(length), group("p", "a", "bbb", "cc", "dd"), group("p", "zzzzzz", "z"))
    assert found == pytest.approx([0.0, 1.0, 0.5, 0.5, 1.0, 0.0])


def test_no_preference_is_half_a_win_for_both():
    assert rewards(Answering(lambda n: [-1] * n), group("p", "a", "bb")) == [0.5, 0.5]


def test_equal_texts_are_a_tie_that_nobody_is_asked_about():
    judge = ScriptedJudge(length)
    assert rewards(judge, group("p", "a", "a"), group("q", "a", "a", "bb")) == pytest.approx(
        [0.5, 0.5, 0.25, 0.25, 1.0]
    )
    assert len(judge.asked) == 2


def test_a_row_alone_in_its_group_has_no_reward_and_asks_nobody():
    judge = ScriptedJudge(length)
    found = judged(judge, group("p", "a"), group("q", "b"))
    assert all(record.reward != record.reward for record in found.records)
    assert judge.asked == []


def test_the_place_of_a_completion_is_told_by_the_texts_and_evens_out():
    first = Answering(lambda n: [0] * n)
    groups = [group(f"p{i}", f"a{i}", f"b{i}") for i in range(400)]
    found = rewards(first, *groups)
    assert found == rewards(first, *groups)
    assert 150 < sum(found[::2]) < 250
    assert rewards(first, *groups[7:])[:2] == found[14:16]


def test_a_judge_of_trls_shape_is_asked_in_our_order():
    class Shuffling:
        def __init__(self):
            self.shuffled = []

        def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[int]:
            self.shuffled.append(shuffle_order)
            return [0] * len(prompts)

    judge = Shuffling()
    assert isinstance(judge, PairwiseJudge)
    rewards(judge, group("p", "a", "b"))
    assert judge.shuffled == [False]


def test_messages_are_read_as_text():
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    assert transcript(messages) == "system: be short\n\nuser: hi"
    judge = ScriptedJudge(length)
    rewards(judge, group(messages, "a", "bb"))
    ((prompt, pair),) = judge.asked
    assert (prompt, sorted(pair)) == (transcript(messages), ["a", "bb"])


def test_an_async_judge_is_waited_for():
    class Waiting(ScriptedJudge):
        async def judge(self, prompts, completions):
            await asyncio.sleep(0.01)
            return super().judge(prompts, completions)

    assert rewards(Waiting(length), group("p", "a", "bb")) == [0.0, 1.0]


def test_a_judge_that_is_late_fails_or_counts_as_none():
    class Slow(ScriptedJudge):
        def judge(self, prompts, completions):
            time.sleep(1.0)
            return super().judge(prompts, completions)

    with pytest.raises(RewardError, match="'Slow' did not return within its time limit"):
        rewards(Slow(length), group("p", "a", "bb"), timeout=0.05)
    unknown = rewards(Slow(length), group("p", "a", "bb"), timeout=0.05, on_failure="none")
    assert all(value != value for value in unknown)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda n: [0] * (n + 1), "to 1 pairs: return one of 0, 1 and -1 for each"),
        (lambda n: None, "the judge answered None"),
        (lambda n: [2] * n, "the judge answered 2 to a pair"),
        (lambda n: ["first"] * n, "the judge answered 'first' to a pair"),
    ],
)
def test_an_answer_that_is_none_is_told(answer, words):
    with pytest.raises(RewardError, match=words):
        rewards(Answering(answer), group("p", "a", "bb"))


def test_how_often_there_was_no_preference_is_logged():
    found = judged(ScriptedJudge(length), group("p", "a", "b"), group("q", "a", "bb"))
    assert found.metrics["judge/no_preference"].value() == 0.5


def test_a_column_named_groups_does_not_tell_the_groups():
    assert rewards(ScriptedJudge(length), group("p", "a", "bb", groups=1), group("q", "cccc", "d", groups=1)) == [
        0,
        1,
        1,
        0,
    ]


def test_pairs_come_from_rewards_or_from_a_judge():
    judge = ScriptedJudge(length)
    assert rewards_or_judge(length, None) is length
    assert isinstance(rewards_or_judge([], judge)[0], JudgeReward)
    with pytest.raises(ArgumentError, match="neither was given"):
        rewards_or_judge(None, None)
    with pytest.raises(ArgumentError, match="both were given"):
        rewards_or_judge([length], judge)


@pytest.mark.parametrize("judge", [length, ScriptedJudge, object()])
def test_what_has_no_judge_is_no_judge(judge):
    with pytest.raises(ArgumentError, match="pass an object with a method judge"):
        JudgeReward(judge)


def test_every_pair_of_a_group_meets_once():
    contest = Contest.of(["p"] * 4 + ["q"], ["a", "b", "c", "d", "e"], [3, 3, 3, 3, 9])
    assert sorted(tuple(sorted(pair)) for pair in contest.pairs) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]

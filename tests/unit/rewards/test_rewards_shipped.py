"""Rewards for form and length."""

from __future__ import annotations

import pickle

import pytest

from lowpeak.errors import ArgumentError
from lowpeak.rewards import (
    LinearLength,
    SoftOverlong,
    format_reward,
    hash_answer_format,
    length_penalty,
    think_answer_format,
)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>\na < b\n</think>\n<answer>5</answer>", 1),
        ("  <think></think><answer></answer>\n", 1),
        ("<think>a</think>b<answer>5</answer>", 0),
        ("<think>a</think><answer>5", 0),
        ("<think>a<think>b</think><answer>5</answer>", 0),
        ("<think>a</think><answer>5</answer> and more", 0),
        ("<answer>5</answer>", 0),
        ("<think>" * 5000, 0),
    ],
)
def test_think_and_answer_stand_once_each_and_nothing_else(text, reward):
    assert think_answer_format([text, [{"role": "assistant", "content": text}]]) == [reward, reward]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("steps\n#### 72", 1),
        ("#### -1,080.50", 1),
        ("####5", 1),
        ("#### $5", 1),
        ("steps #### 72", 0),
        ("#### 1\n#### 2", 0),
        ("#### seventy", 0),
        ("#### 72\nHuman:", 0),
        ("72", 0),
    ],
)
def test_the_answer_line_stands_once_at_the_end_with_a_number(text, reward):
    assert hash_answer_format([text]) == [reward]


def test_a_format_matches_the_whole_completion_over_lines():
    reward = format_reward(r"\d+.*!", name="shout")
    assert reward(["1 a\nb!", "a 1!", "1! ", "1"], completion_ids=[]) == [1.0, 0.0, 1.0, 0.0]
    assert reward.__name__ == "shout"


def test_soft_overlong_is_equation_13_of_dapo():
    reward = SoftOverlong(max_length=100, cache=20)
    ids = [[0] * length for length in (0, 80, 81, 90, 100, 101, 500)]
    assert reward(ids) == pytest.approx([0, 0, -1 / 20, -0.5, -1, -1, -1])
    assert SoftOverlong(10, 0)([[0] * 10, [0] * 11]) == [0, -1]


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda: SoftOverlong(10, 11), r"cache .*max_length 10.* 11"), (lambda: format_reward("(a"), r"'\(a'")],
)
def test_a_reward_that_cannot_be_made_is_refused_with_its_argument(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def test_the_linear_penalty_grows_with_each_token_past_the_free_ones():
    assert LinearLength(per_token=0.5, free=2)(completion_ids=[[1], [1] * 2, [1] * 4]) == [0, 0, -1]
    assert length_penalty([[0] * 500]) == [-0.5]


@pytest.mark.parametrize("reward", [SoftOverlong(4, 2), length_penalty, think_answer_format])
def test_shipped_rewards_can_be_sent_to_another_process(reward):
    arguments = {"completions": ["a"], "completion_ids": [[1, 2, 3]]}
    assert pickle.loads(pickle.dumps(reward))(**arguments) == reward(**arguments)

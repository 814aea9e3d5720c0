"""Built-in rewards: final answers, on GSM8K's answers and on text as models write it; formats and lengths."""

from __future__ import annotations

import json
import os
import pickle
import time
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

from lowpeak.errors import ArgumentError, RewardError
from lowpeak.rewards.builtin import (
    LinearLength,
    SoftOverlong,
    accuracy_reward,
    exact_match,
    final_answer,
    final_number,
    format_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    hash_answer_format,
    length_penalty,
    numeric_match,
    reasoning_accuracy_reward,
    think_answer_format,
    think_format_reward,
)
from lowpeak.rewards.function import call_with_timeout

# In the shape of GSM8K's; all of those where `LOWPEAK_GSM8K` names their folder.
ANSWERS = [
    "It goes 60*18=<<60*18=1080>>1,080 miles.\n#### 1,080",
    "It was 2-9=<<2-9=-7>>-7 degrees.\n#### -7",
    "All of it: $109,200,000.\n#### 109,200,000",
    "12/60 = $<<12/60=0.2>>0.2 a minute.\n0.2*50 = $10\n#### 10",
    "There were 5-5=<<5-5=0>>0 guests.\n#### 0",
    "30*45=<<30*45=1350>>1350 square feet.\n#### 1350",
    "They scored 1+1+1=<<1+1+1=3>>3 goals.\n#### 3",
    "It rises 200*0.1=$<<200*0.1=20>>20.\nSo it is 200+20=$<<200+20=220>>220.\n#### 220",
]
if folder := os.environ.get("LOWPEAK_GSM8K"):
    lines = [line for name in ("train", "test") for line in (Path(folder) / f"{name}.jsonl").read_text().splitlines()]
    ANSWERS = [json.loads(line)["answer"] for line in lines]
NUMBERS = sorted({answer.rpartition("####")[2].strip() for answer in ANSWERS})
FINAL = [f"#### {number}" for number in NUMBERS]


def plain(number: str) -> str:
    return number.replace(",", "")


def with_commas(number: str) -> str:
    return f"{int(plain(number)):,}"


VARIANTS = {
    "alone": lambda n: n,
    "without commas": lambda n: f"The answer is {plain(n)}.",
    "with commas": lambda n: f"It is {with_commas(n)}.",
    "dollars": lambda n: f"She paid ${with_commas(n)}" if not n.startswith("-") else f"She paid -${with_commas(n)[1:]}",
    "decimals": lambda n: f"#### {plain(n)}.00",
    "boxed": lambda n: rf"so 3 of 5, thus \boxed{{{n}}} as 1 + 1 is 2.",
    "boxed dollars with a unit": lambda n: rf"\boxed{{\${n}\text{{ dollars}}}}",
    "latex commas": lambda n: rf"\boxed{{{n.replace(',', '{,}')}}}",
    "tag": lambda n: f"<think>10 - 3</think>\n<answer> {n} </answer>",
    "tag not closed": lambda n: f"<answer>{n}",
    "hashes on their own line": lambda n: f"steps\n####\n{n}\nHuman: 5 more",
    "percent": lambda n: f"#### {n}%",
    "bold": lambda n: f"The answer is **{n}**.",
    "equation": lambda n: f"3 x 4 = {n}",
}


def test_every_answer_matches_itself_as_number_and_as_text():
    assert numeric_match(ANSWERS, answer=ANSWERS) == [1.0] * len(ANSWERS)
    assert exact_match(ANSWERS, answer=ANSWERS) == [1.0] * len(ANSWERS)
    assert hash_answer_format(ANSWERS) == [1.0] * len(ANSWERS)


@pytest.mark.parametrize(
    "change", [lambda x: x + 1, lambda x: -x - 1, lambda x: 10 * x + 1], ids=["+1", "sign", "digit"]
)
def test_no_answer_matches_a_changed_number(change):
    changed = [f"1 + 2\n#### {change(int(plain(number)))}" for number in NUMBERS]
    for match in (numeric_match, exact_match):
        assert match(changed, answer=FINAL) == [0.0] * len(FINAL)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_same_number_written_otherwise_matches(variant):
    completions = [variant(number) for number in NUMBERS]
    rewards = numeric_match(completions, answer=FINAL)
    assert [c for c, reward in zip(completions, rewards, strict=True) if reward != 1] == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", 72),
        ("-$5", -5),
        ("$-5", -5),
        ("\u22127", -7),
        ("10-5", 5),
        ("x-5", 5),
        ("= -5", -5),
        ("- 5 apples", 5),
        ("0.25", Fraction(1, 4)),
        ("about .5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
        (r"\boxed{-\dfrac{3}{4}}", Fraction(-3, 4)),
        ("1/0", None),
        ("1,2,3", 3),
        ("1,234,56", 56),
        ("12 apples, 3.", 3),
        (r"\boxed{5} and then \boxed{7", 5),
        ("#### 1\n\n#### 2", 2),
        (r"#### 1 and \boxed{2}", 2),
        (r"\boxed{no number} 5", None),
        ("nothing", None),
        ("", None),
        ("9" * 5000, None),
        ("1e999999999", 999999999),
    ],
)
def test_the_final_number_of_a_text(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize("text", [r"\boxed{" * 8000, "#### " * 8000, "<answer>" * 8000, "1," * 20000, "-$" * 20000])
def test_degenerate_completions_are_read_quickly(text):
    start = time.perf_counter()
    final_number(text), final_answer(text)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Let me see.\nParis", "Paris"),
        ("Paris\n\n", "Paris"),
        (r"It is \boxed{\text{Paris}}", r"\text{Paris}"),
        ("<answer>\nNew   York\n</answer> done", "New York"),
        ("#### 1,080", "1,080"),
        ("", ""),
    ],
)
def test_the_final_answer_of_a_text(text, answer):
    assert final_answer(text) == answer


NOTHING = [{"role": "assistant", "content": None}]
PARTS = [{"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "2"}]}]
TURNS = [{"role": role, "content": text} for role, text in (("assistant", "1"), ("tool", "3"), ("assistant", "#### 2"))]


@pytest.mark.parametrize(
    ("match", "completions", "column", "rewards"),
    [
        (exact_match, ["1,080", "1080", "1080 "], {"answer": ["1080"] * 3}, [0, 1, 1]),
        (numeric_match, ["1,080", "1080", "1081"], {"answer": ["1080"] * 3}, [1, 1, 0]),
        (numeric_match, ["0.1", "0.10000000000000000001", "0.00001"], {"answer": [0.1, 0.1, 1e-5]}, [1, 0, 1]),
        (exact_match, ["a", "b", ""], {"answer": ["a", None, ""]}, [1, None, None]),
        (numeric_match, ["1", "1", "1"], {"answer": ["1", None, "no number"]}, [1, None, None]),
        (numeric_match, ["5", "6"], {"solution": [5, 5.0]}, [1, 0]),
        (numeric_match, [TURNS, PARTS, NOTHING, []], {"answer": ["2"] * 4}, [1, 1, 0, 0]),
    ],
)
def test_final_answers_are_compared_with_the_column(match, completions, column, rewards):
    assert match(completions, **column) == rewards


def test_without_a_column_the_error_names_it():
    with pytest.raises(RewardError, match=r"'numeric_match' .*'answer'.*'solution'"):
        numeric_match(["1"])


# Of each format: what it accepts, and what it does not.
FORMATS = {
    think_answer_format: (
        ["<think>\na < b\n</think>\n<answer>5</answer>", "  <think></think><answer></answer>\n"],
        [
            *("<think>a</think>b<answer>5</answer>", "<think>a</think><answer>5", "<answer>5</answer>"),
            *("<think>a<think>b</think><answer>5</answer>", "<think>a</think><answer>5</answer> and more"),
            "<think>" * 5000,
        ],
    ),
    hash_answer_format: (
        ["steps\n#### 72", "#### -1,080.50", "####5", "#### $5"],
        ["steps #### 72", "#### 1\n#### 2", "#### seventy", "#### 72\nHuman:", "72"],
    ),
    think_format_reward: (
        ["<think>a</think> b", "<think>\n</think>"],
        ["<think>a", " <think>a</think>", "a", "<think>a</think><think>b</think>", "</think><think>"],
    ),
    format_reward(r"\d+.*!", name="shout"): (["1 a\nb!", "1! "], ["a 1!", "1"]),
}


@pytest.mark.parametrize("reward", FORMATS, ids=lambda reward: reward.__name__)
def test_a_format_matches_the_whole_completion_or_is_worth_nothing(reward):
    accepted, refused = FORMATS[reward]
    expected = [1] * len(accepted) + [0] * len(refused)
    chats = [[{"role": "assistant", "content": text}] for text in accepted + refused]
    for completions in (accepted + refused, chats):
        assert reward(completions, prompts=["p"] * len(completions)) == expected


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


# Of texts and solutions: what TRL 1.16's accuracy_reward and reasoning_accuracy_reward return.
FORMULAS = [
    (r"My answer is \boxed{\frac{1}{3}}", r"\frac{1}{3}", 1.0, 0.0),
    (r"so \boxed{0.5}", r"$\frac12$", 1.0, 0.0),
    (r"so \boxed{0.5}", "no formula", None, 0.0),
    (r"so \boxed{0.5}", "", None, 0.0),
    (r"\boxed{7} or \boxed{8}", "7", 0.0, 0.0),
    (r"\boxed{3 \text{ cm}}", "3", 1.0, 0.0),
    (r"<think> \boxed{2} </think> it is \boxed{3}", "3", 1.0, 1.0),
    (r"<think> \boxed{2} </think> it is \boxed{3}", "no formula", None, None),
    (r"<think> \boxed{3}", "3", 1.0, 0.0),
    ("7", "7", 0.0, 0.0),
    (r"\boxed{\frac{", "7", 0.0, 0.0),
    ("", "7", 0.0, 0.0),
]


@pytest.mark.parametrize(("text", "solution", "whole", "after_reasoning"), FORMULAS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_formulas_are_compared_as_in_trl(text, solution, whole, after_reasoning, in_thread):
    chat = [[{"role": "assistant", "content": text}]]
    for reward, expected in ((accuracy_reward, whole), (reasoning_accuracy_reward, after_reasoning)):
        for completions in ([text], chat):
            call = partial(reward, completions, solution=[solution], prompts=["p"])
            assert (call_with_timeout(call, 60) if in_thread else call()) == [expected]


def test_the_end_of_reasoning_may_be_another_mark():
    texts = [r"hm \boxed{2} [END] \boxed{3}", r"</think> \boxed{3}"]
    assert reasoning_accuracy_reward(texts, ["3", "3"], reasoning_delimiters=["[END]"]) == [1.0, 0.0]


def test_a_repetition_costs_its_share_of_the_n_grams():
    reward = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    assert reward([[1, 2, 3, 4], [5] * 5, [5, 5], [5], []]) == [0, -0.75, 0, 0, 0]
    assert reward.__name__ == "repetition_penalty_reward"
    with pytest.raises(ArgumentError, match="max_penalty"):
        get_repetition_penalty_reward(max_penalty=0.5)


def test_a_right_answer_is_worth_more_if_it_is_short_and_a_wrong_one_if_it_is_long():
    reward = get_cosine_scaled_reward(max_len=100)
    ids = [[1] * length for length in (0, 50, 100, 500)]
    right, wrong = [r"\boxed{3}"] * 4, [r"\boxed{2}"] * 4
    assert reward(right, ["3"] * 4, ids) == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert reward(wrong, ["3"] * 4, ids) == pytest.approx([-1.0, -0.75, -0.5, -0.5])
    assert reward(right[:1], ["none"], ids[:1]) == [None]
    with pytest.raises(ArgumentError, match="max_len"):
        get_cosine_scaled_reward(max_len=0)


@pytest.mark.parametrize("reward", [SoftOverlong(4, 2), length_penalty, think_answer_format])
def test_shipped_rewards_can_be_sent_to_another_process(reward):
    arguments = {"completions": ["a"], "completion_ids": [[1, 2, 3]]}
    assert pickle.loads(pickle.dumps(reward))(**arguments) == reward(**arguments)

"""Answers of several ranks, and of one rank in portions, become one as if a single rank had judged all at once."""

from __future__ import annotations

import torch

from lowpeak.records import Completion, Group, Prompt
from lowpeak.rewards.factory import make_rewards
from lowpeak.rewards.panel import RewardedCompletions, RewardPanel, RewardSettings, merge_rewarded_completions
from lowpeak.training.collector import merge_in_prompt_order, with_reward_statistics

TEXTS = (("a", "bb"), ("", "dddd"), ("e", "f"), ("ggg", ""), ("hh", "i"))


def length(completions, log_extra, log_metric, **columns):
    if any("d" in text for text in completions):
        log_extra("size", [len(text) for text in completions])
    log_metric("longest", max(map(len, completions)))
    return [float(len(text)) for text in completions]


def group(number: int) -> Group:
    def completion(text: str) -> Completion:
        ids = torch.tensor([ord(letter) for letter in text], dtype=torch.int32)
        return Completion(ids, torch.zeros(len(ids)), torch.ones(len(ids), dtype=torch.bool), "stop")

    return Group(Prompt(number, (number,), f"p{number}"), tuple(map(completion, TEXTS[number])))


def compute_rewards(*numbers: int) -> RewardedCompletions:
    panel = RewardPanel(make_rewards([length]), RewardSettings((1.0,)), lambda ids: "".join(map(chr, ids)))
    return panel.compute_rewards([group(number) for number in numbers])


def test_ranks_answers_come_in_the_order_of_the_prompts_with_the_statistics_of_all():
    alone = compute_rewards(0, 1, 2, 3, 4)
    shares = [((1, 4), compute_rewards(1, 4)), ((), compute_rewards()), ((0, 2, 3), compute_rewards(0, 2, 3))]
    together = with_reward_statistics(merge_in_prompt_order(shares, 0), ("length",))
    assert together.completions == alone.completions
    assert together.prompts == alone.prompts
    assert [record.group for record in together.records] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [record.rewards for record in together.records] == [record.rewards for record in alone.records]
    assert together.extra == {"size": [None, None, 0, 4, None, None, None, None, 2, 1]}
    for name in ("rewards/length/mean", "rewards/length/std"):
        assert together.metrics[name] == alone.metrics[name]
    assert together.metrics["longest"].value() == (4.0 + 3.0) / 2


def test_groups_are_numbered_from_where_the_last_answer_ended():
    later = merge_in_prompt_order([((1,), compute_rewards(1)), ((0,), compute_rewards(0))], 7)
    assert [(record.group, text) for record, text in zip(later.records, later.completions, strict=True)] == [
        *((7, text) for text in TEXTS[0]),
        *((8, text) for text in TEXTS[1]),
    ]


def test_portions_have_the_statistics_of_the_whole():
    portions = [
        merge_in_prompt_order([((0, 1), compute_rewards(0, 1))], 0),
        merge_in_prompt_order([((0, 1, 2), compute_rewards(2, 3, 4))], 2),
    ]
    assert (
        with_reward_statistics(merge_rewarded_completions(portions), ("length",)).metrics["rewards/length/std"]
        == compute_rewards(0, 1, 2, 3, 4).metrics["rewards/length/std"]
    )

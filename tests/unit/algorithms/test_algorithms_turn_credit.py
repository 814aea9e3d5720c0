"""Advantages per turn, against their formulas written out, and equal to the outcome's where they must be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowpeak.algorithms.grpo import grpo_advantages
from lowpeak.algorithms.turn_credit import turn_advantages, turn_ranges
from lowpeak.arguments import TurnCredit
from lowpeak.records import Completion, Record
from step_settings import GRPO

MASKS = ([1, 1, 0, 0, 1, 0, 1, 1], [1, 0, 1], [1, 1])


def record(mask, reward, token_rewards=None, group=0):
    size = len(mask)
    completion = Completion(torch.zeros(size, dtype=torch.int32), torch.zeros(size), torch.tensor(mask).bool(), "stop")
    tokens = None if token_rewards is None else torch.tensor(token_rewards)
    return Record(group, (1,), completion, (reward,), reward, token_rewards=tokens)


def test_turns_are_the_runs_of_sampled_tokens():
    assert turn_ranges(torch.tensor(MASKS[0]).bool()) == [(0, 2), (4, 5), (6, 8)]
    assert turn_ranges(torch.zeros(3).bool()) == []


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_discount_1_with_an_outcome_alone_equals_the_outcomes_advantages_to_the_bit(scale):
    rewards = (1.0, 0.3, float("nan"), 0.7, 0.7)
    records = [
        record(mask, reward, group=i // 3)
        for i, (mask, reward) in enumerate(zip([*MASKS, *MASKS[:2]], rewards, strict=True))
    ]
    outcome = grpo_advantages(replace(GRPO, scale_rewards=scale), records).per_token
    credit = TurnCredit("discounted", 1.0)
    per_turn = grpo_advantages(replace(GRPO, scale_rewards=scale, turn_credit=credit), records).per_token
    for one, other, each in zip(outcome, per_turn, records, strict=True):
        mask = each.completion.loss_mask
        assert torch.equal(one[mask], other[mask])


@pytest.mark.parametrize("discount", [0.5, 1.0])
def test_discounted_and_turn_credit_follow_their_formulas(discount):
    # Turn rewards 1, 0, 2 and outcome 4; 3, 0 and 1; 5 and 0.
    group = [
        record(MASKS[0], 7.0, [0.0, 1, 0, 0, 0, 0, 2, 0]),
        record(MASKS[1], 4.0, [3.0, 0, 0]),
        record(MASKS[2], 5.0, [2.0, 3]),
    ]
    d = discount
    returns = [[1 + d * (0 + d * 6), 0 + d * 6, 6], [3 + d * 1, 1, 1], [5, 5, 5]]
    means = [sum(each[k] for each in returns) / 3 for k in range(3)]
    got = turn_advantages(TurnCredit("discounted", discount), group)
    assert got[0].tolist() == pytest.approx(
        [returns[0][0] - means[0]] * 2 + [0, 0, returns[0][1] - means[1], 0] + [returns[0][2] - means[2]] * 2
    )
    assert got[1].tolist() == pytest.approx([returns[1][0] - means[0], 0, returns[1][1] - means[1]])
    by_turn = turn_advantages(TurnCredit("turn", 1.0), group)
    outcome = [4 - 5 / 3, 1 - 5 / 3, 0 - 5 / 3]
    assert by_turn[0].tolist() == pytest.approx(
        [1 - 3 + outcome[0]] * 2 + [0, 0, 0 + outcome[0], 0] + [2 - 2 + outcome[0]] * 2
    )
    assert by_turn[2].tolist() == pytest.approx([5 - 3 + outcome[2]] * 2)

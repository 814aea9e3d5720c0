"""Advantages per turn of a conversation, from the rewards of its turns and of the whole.

A turn is a run of tokens that the policy wrote. Its reward r_k is the sum of its tokens' rewards; the outcome O is the part of a
completion's reward R that no token has. Means are over the completions of a group.

    outcome      A   = R - mean(R)                                         one number for the completion
    turn         A_k = r_k - mean(r_k) + O - mean(O)                       the mean over the group's k-th turns
    discounted   A_k = G_k - mean(G_k),   G_k = r_k + discount * G_{k+1}   the last turn's reward includes O

A completion with fewer turns counts in the mean of a later G_k with its last turn's. With discount 1 and an outcome alone the
discounted advantage is the outcome's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowpeak.algorithms.groups import centered
from lowpeak.arguments import TurnCredit
from lowpeak.records import Record


def turn_ranges(mask: Tensor) -> list[tuple[int, int]]:
    """Return the first token of each run of True in a mask [C], and the one after its last."""
    edges = torch.diff(mask.int(), prepend=mask.new_zeros(1).int(), append=mask.new_zeros(1).int())
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True))


def turn_advantages(credit: TurnCredit, group: Sequence[Record]) -> list[Tensor]:
    """Return the advantages of a group's completions before they are scaled: float64 [C] each, NaN without a reward."""
    ranges = [turn_ranges(record.completion.loss_mask) or [(0, len(record.completion))] for record in group]
    rewards = [_turn_rewards(record, turns) for record, turns in zip(group, ranges, strict=True)]
    totals = torch.tensor([record.reward for record in group], dtype=torch.float64)
    outcomes = totals - torch.stack([each.sum() for each in rewards])
    columns = _columns(credit, rewards, outcomes)
    advantages = []
    for i, (record, turns) in enumerate(zip(group, ranges, strict=True)):
        values = torch.zeros(len(record.completion), dtype=torch.float64)
        for k, (start, stop) in enumerate(turns):
            values[start:stop] = columns[k][i]
        advantages.append(values)
    return advantages


def _columns(credit: TurnCredit, rewards: Sequence[Tensor], outcomes: Tensor) -> list[Tensor]:
    """Return the advantages of each turn's number: float64 [G]."""
    numbers = range(max(map(len, rewards)))
    if credit.kind == "turn":
        return [_centered_turn(rewards, k) + centered(outcomes) for k in numbers]
    pairs = zip(rewards, outcomes.tolist(), strict=True)
    returns = [_returns(each, outcome, credit.discount) for each, outcome in pairs]
    return [centered(torch.stack([each[min(k, len(each) - 1)] for each in returns])) for k in numbers]


def _turn_rewards(record: Record, turns: Sequence[tuple[int, int]]) -> Tensor:
    tokens = record.token_rewards
    if tokens is None:
        return torch.zeros(len(turns), dtype=torch.float64)
    return torch.stack([tokens[start:stop].double().sum() for start, stop in turns])


def _returns(rewards_K: Tensor, outcome: float, discount: float) -> Tensor:
    """Return the discounted sum of a turn's reward and those after it: float64 [K]."""
    returns_K = rewards_K.clone()
    returns_K[-1] += outcome
    for k in range(len(returns_K) - 2, -1, -1):
        returns_K[k] += discount * returns_K[k + 1]
    return returns_K


def _centered_turn(rewards: Sequence[Tensor], number: int) -> Tensor:
    """Return the rewards of the group's turns of this number less their mean [G]; 0 for a completion without it."""
    column_G = torch.tensor([float(each[number]) if number < len(each) else torch.nan for each in rewards]).double()
    return centered(column_G).nan_to_num(nan=0.0)

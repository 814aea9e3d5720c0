"""Advantages per turn of a conversation, from the rewards of its turns and of the whole.

A turn is a run of tokens that the policy wrote. Its reward r_k is the sum of its tokens' rewards; the outcome O is the part of a
completion's reward R that no token has. Means are over the completions of a group; RLOO's are over the others of the group.

    outcome      A   = R - mean(R)                                         one number for the completion
    turn         A_k = r_k - mean(r_k) + O - mean(O)                       the mean over the group's k-th turns
    discounted   A_k = G_k - mean(G_k),   G_k = r_k + discount * G_{k+1}   the last turn's reward includes O

A completion with fewer turns counts in the mean of a later G_k with its last turn's. With discount 1 and an outcome alone the
discounted advantage is the outcome's. RLOO's KL is in R, so it is in O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lowpeak.algorithms.groups import indices_by_group
from lowpeak.arguments import TurnCredit
from lowpeak.records import Record


def turn_ranges(mask: Tensor) -> list[tuple[int, int]]:
    """Return the first token of each run of True in a mask [C], and the one after its last."""
    edges = torch.diff(mask.int(), prepend=mask.new_zeros(1).int(), append=mask.new_zeros(1).int())
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True))


def turn_advantages(
    credit: TurnCredit,
    records: Sequence[Record],
    rewards_N: Tensor,
    subtract_baseline: Callable[[Tensor], Tensor],
    divisors_N: Tensor,
) -> tuple[Tensor, ...]:
    """Return the advantages of a rollout's completions: float32 [C] each, 0 without a reward.

    `rewards_N` are float64 totals R. `subtract_baseline` maps values of a group, [G], to these less their means.
    """
    advantages = [torch.zeros(0)] * len(records)
    for indices in indices_by_group(records).values():
        group = [records[i] for i in indices]
        for i, values in zip(
            indices, _group_advantages(credit, group, rewards_N[indices], subtract_baseline), strict=True
        ):
            advantages[i] = (values / divisors_N[i]).nan_to_num(nan=0.0).float()
    return tuple(advantages)


def _group_advantages(
    credit: TurnCredit, group: Sequence[Record], rewards_G: Tensor, subtract_baseline: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Yield the advantages of each completion of a group: float64 [C], NaN without a reward."""
    ranges = [turn_ranges(record.completion.loss_mask) or [(0, len(record.completion))] for record in group]
    rewards = [_turn_rewards(record, turns) for record, turns in zip(group, ranges, strict=True)]
    columns = _columns(credit, rewards, rewards_G - torch.stack([each.sum() for each in rewards]), subtract_baseline)
    for i, (record, turns) in enumerate(zip(group, ranges, strict=True)):
        values = torch.zeros(len(record.completion), dtype=torch.float64)
        for k, (start, stop) in enumerate(turns):
            values[start:stop] = columns[k][i]
        yield values


def _columns(
    credit: TurnCredit, rewards: Sequence[Tensor], outcomes_G: Tensor, subtract_baseline: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Return the advantages of each turn's number: float64 [G]."""
    numbers = range(max(map(len, rewards)))
    if credit.kind == "turn":
        outcome_G = subtract_baseline(outcomes_G)
        # A completion without a k-th turn is in no mean of k-th turns.
        columns = (
            torch.stack([each[k] if k < len(each) else each.new_tensor(torch.nan) for each in rewards]) for k in numbers
        )
        return [subtract_baseline(column_G).nan_to_num(nan=0.0) + outcome_G for column_G in columns]
    pairs = zip(rewards, outcomes_G.tolist(), strict=True)
    returns = [_returns(each, outcome, credit.discount) for each, outcome in pairs]
    return [subtract_baseline(torch.stack([each[min(k, len(each) - 1)] for each in returns])) for k in numbers]


def _turn_rewards(record: Record, turns: Sequence[tuple[int, int]]) -> Tensor:
    """Return the rewards of a completion's turns: float64 [K], NaN if the completion has no reward."""
    tokens = torch.zeros(len(record.completion)) if record.token_rewards is None else record.token_rewards
    rewards_K = torch.stack([tokens[start:stop].double().sum() for start, stop in turns])
    return torch.full_like(rewards_K, torch.nan) if math.isnan(record.reward) else rewards_K


def _returns(rewards_K: Tensor, outcome: float, discount: float) -> Tensor:
    """Return the discounted sum of a turn's reward and those after it: float64 [K]."""
    returns_K = rewards_K.clone()
    returns_K[-1] += outcome
    for k in range(len(returns_K) - 2, -1, -1):
        returns_K[k] += discount * returns_K[k + 1]
    return returns_K

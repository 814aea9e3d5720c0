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

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lowpeak.algorithms.groups import indices_by_group, unbiased_std
from lowpeak.arguments import TurnCreditKind
from lowpeak.records import Record


def turn_ranges(mask: Tensor) -> list[tuple[int, int]]:
    """Return the first token of each run of True in a mask [C], and the one after its last."""
    edges = torch.diff(mask.int(), prepend=mask.new_zeros(1).int(), append=mask.new_zeros(1).int())
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True))


def turn_advantages(
    kind: TurnCreditKind,
    discount: float,
    records: Sequence[Record],
    rewards_N: Tensor,
    center: Callable[[Tensor], Tensor],
    divisors_N: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the advantages of a rollout's completions: float32 [C] each, 0 without a reward.

    `rewards_N` are totals R; `center` subtracts the mean of a group's values [G]. Scaled advantages are divided by
    `divisors_N`, but at least by the largest std of the group's k-th turns.
    """
    advantages = [torch.zeros(len(record.completion)) for record in records]
    for indices in indices_by_group(records).values():
        masks = [records[i].completion.loss_mask for i in indices]
        # Without a loss token, all of it is one turn.
        ranges = [turn_ranges(mask) or [(0, len(mask))] for mask in masks]
        rewards = [_turn_rewards(records[i], turns) for i, turns in zip(indices, ranges, strict=True)]
        rewards_GK = pad_sequence(rewards, batch_first=True, padding_value=torch.nan)
        rewards_GK[rewards_N[indices].isnan()] = torch.nan
        outcomes_G = rewards_N[indices] - rewards_GK.nansum(1)
        advantages_GK = _unscaled_advantages(kind, discount, rewards_GK, outcomes_G, center)
        spread = max(map(unbiased_std, rewards_GK.T))  # not 0 for different turns of equal totals
        for row, (i, turns) in enumerate(zip(indices, ranges, strict=True)):
            divisor = 1.0 if divisors_N is None else max(float(divisors_N[i]), spread)
            for (start, stop), advantage in zip(turns, advantages_GK[row] / divisor, strict=False):
                advantages[i][start:stop] = advantage.nan_to_num(nan=0.0)
    return tuple(advantages)


def _turn_rewards(record: Record, turns: Sequence[tuple[int, int]]) -> Tensor:
    tokens = torch.zeros(len(record.completion)) if record.token_rewards is None else record.token_rewards
    return torch.stack([tokens[start:stop].double().sum() for start, stop in turns])


def _unscaled_advantages(
    kind: TurnCreditKind, discount: float, rewards_GK: Tensor, outcomes_G: Tensor, center: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the advantages of a group's turns [G, K]; `rewards_GK` is NaN after a completion's last turn."""
    if kind == "turn":
        outcome_G = center(outcomes_G)
        return torch.stack([center(reward_G).nan_to_num(nan=0.0) + outcome_G for reward_G in rewards_GK.T], 1)
    advantages: list[Tensor] = []
    lasts_G = (~rewards_GK.isnan()).sum(1).clamp(min=1) - 1
    returns_G = rewards_GK.gather(1, lasts_G[:, None])[:, 0] + outcomes_G
    for k in reversed(range(rewards_GK.shape[1])):
        returns_G = torch.where(k < lasts_G, rewards_GK[:, k] + discount * returns_G, returns_G)
        advantages.insert(0, center(returns_G))
    return torch.stack(advantages, 1)

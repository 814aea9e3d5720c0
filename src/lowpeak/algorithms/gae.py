"""Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438, equation 16) over completions of many lengths.

    delta_t = r_t + gamma * V_{t+1} - V_t,   A_t = delta_t + gamma * lambda * A_{t+1}

A completion is an episode: after its last token the value and the advantage are 0, whether it ended by itself or was cut.
Shapes: N completions, C tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def gae(
    rewards: Sequence[Tensor], values: Sequence[Tensor], gamma: float, gae_lambda: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Advantages, and returns `A_t + V_t`, of each completion's rewards and values per token, in float64.

    One visit from the longest completion's end to its beginning, over all completions at once. An empty completion has none.
    """
    lengths = [len(reward) for reward in rewards]
    rewards_NC, values_NC = _padded(rewards), _padded(values)
    # A pad's reward and value are 0, so that its advantage is 0 and adds nothing to the last token's.
    next_values_NC = torch.cat([values_NC[:, 1:], values_NC.new_zeros(len(lengths), 1)], dim=1)
    deltas_NC = rewards_NC + gamma * next_values_NC - values_NC
    advantages_NC = torch.zeros_like(deltas_NC)
    running_N = deltas_NC.new_zeros(len(lengths))
    for t in reversed(range(deltas_NC.shape[1])):
        running_N = deltas_NC[:, t] + gamma * gae_lambda * running_N
        advantages_NC[:, t] = running_N
    advantages = tuple(row[:length] for row, length in zip(advantages_NC, lengths, strict=True))
    return advantages, tuple(a + v.double() for a, v in zip(advantages, values, strict=True))


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows side by side, 0 behind them: float64 [N, C], C at least 1."""
    return pad_sequence([*(row.double() for row in rows), torch.zeros(1, dtype=torch.float64)], batch_first=True)[:-1]

"""Entropy: the mask of the most uncertain tokens, and the coefficient that holds the policy's entropy up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import ENTROPY_COEF
from lowpeak.arguments import EntropyBonus

_ROUNDING = 1e-5  # nats


def top_entropy_masks(entropies: Sequence[Tensor], quantile: float) -> list[Tensor]:
    """1.0 where a token's entropy is among the highest `quantile` of all given tokens, else 0.0, per tensor.

    `entropy >= torch.quantile(cat(entropies), 1 - quantile)`, one threshold for the whole rollout's counted tokens
    (arXiv 2506.01939). Tokens at the threshold are in, and those below it by less than rounding in fp32: the same context
    has the same entropy in whichever micro-batch it was forwarded. A quantile of 1 takes all tokens.
    """
    values = torch.cat([entropy.flatten() for entropy in entropies]) if entropies else torch.empty(0)
    if values.numel() == 0:
        return [torch.zeros_like(entropy) for entropy in entropies]
    # An order statistic, since torch.quantile refuses more than 2^24 tokens: nothing lies between two neighbours, so
    # the interpolated threshold and the upper neighbour admit the same tokens. The slack keeps 3.0000000000000004 at 3.
    rank = math.ceil((1.0 - quantile) * (values.numel() - 1) - 1e-9)
    threshold = values.kthvalue(max(rank, 0) + 1).values
    return [(entropy >= threshold - _ROUNDING).to(entropy.dtype) for entropy in entropies]


def start_entropy_state(bonus: EntropyBonus | None) -> dict[str, float]:
    """The steered coefficient at the first step: no bonus yet, as no entropy is known; nothing without a target."""
    if bonus is None or bonus.target is None:
        return {}
    return {ENTROPY_COEF: 0.0, "entropy_control": bonus.coef}


def entropy_schedule(bonus: EntropyBonus | None, step: int, epoch: float) -> dict[str, float]:
    """The fixed coefficient, at every step; nothing where it is steered."""
    return {} if bonus is None or bonus.target is not None else {ENTROPY_COEF: bonus.coef}


def next_entropy_state(
    bonus: EntropyBonus | None, state: Mapping[str, float], metrics: Mapping[str, float]
) -> Mapping[str, float]:
    """The coefficients after a step whose mean token entropy is `metrics["entropy"]` (Skywork-OR1, arXiv 2505.22312).

    `entropy_control` moves by `delta` within [minimum, maximum]: up at or below the target, down above. The loss's
    `entropy_coef` is that number at or below the target and 0 above, where nothing has to be held up. Without a
    target, or after a step without tokens (no entropy, or NaN), the state stays.
    """
    entropy = metrics.get("entropy", math.nan)
    if bonus is None or bonus.target is None or math.isnan(entropy):
        return state
    low = entropy <= bonus.target
    moved = state["entropy_control"] + (bonus.delta if low else -bonus.delta)
    control = min(max(moved, bonus.minimum), bonus.maximum)
    return {ENTROPY_COEF: control if low else 0.0, "entropy_control": control}

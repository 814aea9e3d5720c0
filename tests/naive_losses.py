"""The losses as their papers write them: row by row and token by token, with Python's own comparisons instead of tensor ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowpeak.arguments.correction import Correction
from lowpeak.arguments.grpo import GRPOSettings
from lowpeak.arguments.rloo import RLOOSettings


@dataclass(frozen=True)
class Row:
    """The counted tokens of one row; `logprobs` and `entropy` are what gradients are asked of."""

    logprobs: Tensor
    entropy: Tensor | None
    old: Tensor
    reference: Tensor
    mask: Tensor
    advantage: float


def plain_grpo(s: GRPOSettings, rows: Sequence[Row], *, on_policy: bool = False, masked: bool = False) -> Tensor:
    """GRPO's family as a sum over rows and tokens."""
    totals, all_tokens = [], []
    for row in rows:
        losses = plain_token_losses(s, row, row.logprobs.detach() if on_policy else row.old, masked)
        all_tokens += losses
        totals.append(sum(losses))
    num_rows = len(rows)
    bonus = 0.0 if s.entropy_bonus is None else 0.3 * torch.cat([row.entropy for row in rows]).mean()
    if s.loss_type == "luspo":
        return sum(totals) / num_rows - bonus
    if s.loss_type in ("grpo", "sapo"):
        return sum(t / max(len(r.logprobs), 1) for t, r in zip(totals, rows, strict=True)) / num_rows - bonus
    if s.loss_type == "dr_grpo":
        return sum(totals) / (num_rows * s.max_completion_length) - bonus
    assert s.loss_type in ("dapo", "bnpo", "cispo", "vespo"), f"give loss_type={s.loss_type!r} its weights here"
    return sum(all_tokens) / len(all_tokens) - bonus


def plain_token_losses(s: GRPOSettings, row: Row, old: Tensor, masked: bool) -> list[Tensor]:
    log_ratios = [p - o for p, o in zip(row.logprobs, old, strict=True)]
    losses = []
    for t, p in enumerate(row.logprobs):
        log_ratio = log_ratios[t] if s.importance_level == "token" else sum(log_ratios) / len(log_ratios)
        ratio = log_ratio.exp()
        policy = plain_policy_term(s, p, ratio, row.advantage, log_ratios)
        if s.off_policy_mask_threshold is not None and row.advantage < 0:
            drift = sum(o - p for p, o in zip(row.logprobs.tolist(), old.tolist(), strict=True)) / len(old)
            policy = policy * (0.0 if drift > s.off_policy_mask_threshold else 1.0)
        loss = policy * row.mask[t] if masked else policy
        d = p - row.reference[t]
        kl = {"k1": d, "k2": 0.5 * d * d, "k3": (-d).exp() + d - 1}[s.kl_estimator]
        loss = loss + s.beta * kl * (ratio if s.bias_corrected_kl else 1.0)
        losses.append(loss)
    return losses


def plain_policy_term(
    s: GRPOSettings, logprob: Tensor, ratio: Tensor, advantage: float, log_ratios: Sequence[Tensor]
) -> Tensor:
    """The policy term by the sign of the advantage: with a positive one only the ceiling binds, else only the floor."""
    if s.sapo is not None:
        tau = s.sapo.positive if advantage > 0 else s.sapo.negative
        return -4 / tau / (1 + (-tau * (ratio - 1)).exp()) * advantage
    if s.vespo is not None:
        return -plain_gamma(s, [each.item() for each in log_ratios], advantage) * advantage * logprob
    ceiling = torch.tensor(1.0 + s.clip_high, dtype=torch.float64)
    if s.loss_type == "cispo":
        return -min(ratio.detach(), ceiling) * advantage * logprob
    if advantage >= 0:
        return -min(ratio, ceiling) * advantage
    floor = torch.tensor(1.0 - s.clip_low, dtype=torch.float64)
    if s.delta is not None:
        ratio = min(ratio, torch.tensor(s.delta, dtype=torch.float64))
    return -max(ratio, floor) * advantage


def plain_gamma(s: GRPOSettings, log_ratios: Sequence[float], advantage: float) -> float:
    """VESPO's weight: exp(decay) w^power exp(-decay w), with the product w of a sequence's ratios."""
    w = math.exp(sum(log_ratios))
    if advantage >= 0:
        return math.exp(s.vespo.positive_decay * (1 - w)) * w**s.vespo.positive_power
    return math.exp(s.vespo.negative_decay * (1 - w)) * w**s.vespo.negative_power


def plain_weights(correction: Correction, old: Tensor, sampling: Tensor) -> Tensor:
    """A sequence's weights for a sampler that drifted, computed with Python numbers."""
    drift = [0.0 if math.isnan(s) else o - s for o, s in zip(old.tolist(), sampling.tolist(), strict=True)]
    if correction.per_sequence:
        drift = [sum(drift) / (len(drift) if correction.geometric else 1)] * len(drift)
    weights = []
    for ratio in map(math.exp, drift):
        inside = min(max(ratio, correction.minimum), correction.maximum)
        weights.append(
            ((1.0 if correction.geometric else ratio) if inside == ratio else 0.0) if correction.masks else inside
        )
    return torch.tensor(weights, dtype=torch.float64)


def plain_rloo(s: RLOOSettings, rows: Sequence[Row], *, weighed: bool = False) -> Tensor:
    """RLOO as a sum over rows with tokens, divided by all rows; `weighed` by the first number of a row's mask."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        if not len(row.logprobs):
            continue
        ratio = (row.logprobs.double().sum() - row.old.double().sum()).exp()
        bound = torch.tensor(1 + s.clip_high if row.advantage >= 0 else 1 - s.clip_low, dtype=torch.float64)
        weight = row.mask[0] if weighed else 1.0
        total = total - weight * (min(ratio, bound) if row.advantage >= 0 else max(ratio, bound)) * row.advantage
    return total / len(rows)

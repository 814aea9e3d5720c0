"""GRPO (DeepSeekMath, arXiv 2402.03300): the rewards of a group are each other's baseline, without a critic.

    A = (reward - mean(group)) / (std(group) + 1e-4)                      one number for a completion, fixed for the rollout
    L = -min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A) + beta * KL     per token; equation 3

Variants, by settings:
1. Dr. GRPO (arXiv 2503.20783): no division by the std, and `dr_grpo`'s weights.
2. DAPO (arXiv 2503.14476): an asymmetric clip, weights per token, groups of equal rewards dropped.
3. GSPO (arXiv 2507.18071): one ratio per sequence.
4. CISPO (MiniMax-M1, arXiv 2506.13585): a clipped weight on the log-prob, so that every token keeps a gradient.
5. SAPO (arXiv 2511.20347): a smooth gate in place of the clip.
6. LUSPO (arXiv 2602.05261): GSPO with the sum over a sequence's tokens in place of their mean.
7. VESPO (arXiv 2602.10693): a smooth weight of the whole sequence's ratio on the log-prob.
8. Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, equation 9), for any of them.
9. GDPO (arXiv 2601.05242): each reward function is normalised before the weighted sum.

Different from the paper: the KL is off unless `beta` is set, and its estimator can be chosen; the std is unbiased.

Shapes: N sequences of the rollout, G of one group, K reward functions, C tokens of one completion; T loss tokens of a
micro-batch, B of its sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import ENTROPY_COEF, Advantages, Algorithm, Need, StepCounts
from lowpeak.algorithms.groups import (
    centered,
    constant_per_token,
    indices_by_group,
    reward_metrics,
    select_all,
    select_unequal,
    total_rewards,
    unbiased_std,
)
from lowpeak.algorithms.loss_terms import (
    Reduction,
    clipped_surrogate,
    corrected_advantages,
    importance_ratio,
    kl_estimate,
    mean_per_sequence,
    off_policy_mask,
    old_logprobs,
    ratio_with_token_gradient,
    repeat_per_token,
    sequence_mean,
    step_weights,
    sum_per_sequence,
    token_mean,
    value_per_sequence,
)
from lowpeak.algorithms.metrics import (
    clip_ratios,
    masked_mean,
    mean_over_step,
    measure_pass,
    measure_sampler,
    weighted_tokens,
)
from lowpeak.algorithms.turn_credit import turn_advantages
from lowpeak.arguments import EntropyBonus, GRPOSettings, SAPOGate, VESPOWeight
from lowpeak.records import Metric, Record, TokenBatch

_STD_EPSILON = 1e-4  # added to a std before it divides
_ENTROPY_ROUNDING = 1e-5  # nats
_ENTROPY_CONTROL = "entropy_control"
# VESPO's bounds of log-ratios, and its least decay: those of its authors' code, which TRL has, too.
_VESPO_BOUND = 20.0
_VESPO_FLOOR = math.log(1e-8)
_LEAST_DECAY = 1e-4


def make_grpo(settings: GRPOSettings) -> Algorithm:
    """Return GRPO; sequences without an advantage are skipped unless a KL or an entropy bonus acts on them."""
    needs: dict[Need, bool] = {
        "old": settings.score_old,
        "reference": settings.beta != 0.0,
        "entropy": settings.top_entropy_quantile < 1.0,
    }
    return Algorithm(
        name="grpo",
        unit=settings.importance_level,
        old_policy=settings.old_policy,
        needs=frozenset(need for need, needed in needs.items() if needed),
        select=select_unequal if settings.drop_equal_groups else select_all,
        advantages=partial(corrected_advantages, settings, partial(grpo_advantages, settings)),
        reduction=grpo_reduction(settings),
        loss=partial(grpo_loss, settings),
        measure=partial(measure_grpo, settings),
        needs_full_sequence=_needs_full_sequence(settings),
        skip_zero_advantage=settings.beta == 0.0 and settings.entropy_bonus is None,
        entropy_bonus=settings.entropy_bonus is not None,
        state=initial_entropy_state(settings.entropy_bonus),
        update=partial(next_entropy_state, settings.entropy_bonus),
        schedule=partial(entropy_schedule, settings.entropy_bonus),
    )


def _needs_full_sequence(settings: GRPOSettings) -> bool:
    correction = settings.step_correction
    corrects_sequences = correction is not None and correction.per_sequence
    return corrects_sequences or settings.vespo is not None or settings.off_policy_mask_threshold is not None


# Advantages


def grpo_advantages(settings: GRPOSettings, records: Sequence[Record]) -> Advantages:
    """Return the advantages of a whole rollout, the same for all tokens of a completion, or of a turn with `turn_credit`.

    The std is the group's, the rollout's, or absent (`scale_rewards`). A sequence without a reward or alone in its group
    gets 0, and so do all sequences of a group whose rewards are equal. Truncated completions count in the statistics.
    """
    if settings.turn_credit != "outcome":
        divisors_N = None if settings.scale_rewards == "none" else _divisors(records, settings.scale_rewards)
        credit = settings.turn_credit, settings.turn_discount
        per_token = turn_advantages(*credit, records, total_rewards(records), centered, divisors_N)
    elif settings.aggregation == "normalize_then_sum":
        per_token = constant_per_token(_normalize_then_sum(records, settings.reward_weights), records)
    else:
        per_token = constant_per_token(_sum_then_normalize(records, settings.scale_rewards), records)
    if settings.top_entropy_quantile < 1.0:
        per_token = _mask_low_entropy(per_token, records, settings.top_entropy_quantile)
    return Advantages(per_token, reward_metrics(records))


def _sum_then_normalize(records: Sequence[Record], scale: str) -> Tensor:
    rewards_N = total_rewards(records)
    advantages_N = torch.empty_like(rewards_N)
    for group in indices_by_group(records).values():
        advantages_N[group] = centered(rewards_N[group])
    return advantages_N / _divisors(records, scale)


def _divisors(records: Sequence[Record], scale: str) -> Tensor:
    """Return the divisor of each record's advantages: the std of its group or of the rollout, or 1: [N]."""
    rewards_N = total_rewards(records)
    divisors_N = torch.full_like(rewards_N, unbiased_std(rewards_N) + _STD_EPSILON if scale == "batch" else 1.0)
    for group in indices_by_group(records).values() if scale == "group" else ():
        divisors_N[group] = unbiased_std(rewards_N[group]) + _STD_EPSILON
    return divisors_N


def _normalize_then_sum(records: Sequence[Record], weights: Sequence[float]) -> Tensor:
    """Normalise each reward function within its group, sum by weights, divide by the rollout's std (GDPO).

    A function that did not score a sequence adds nothing to its sum.
    """
    rewards_NK = torch.tensor([record.rewards for record in records], dtype=torch.float64)
    normalized_NK = torch.empty_like(rewards_NK)
    for group in indices_by_group(records).values():
        for k in range(rewards_NK.shape[1]):
            column_G = rewards_NK[group, k]
            normalized_NK[group, k] = centered(column_G) / (unbiased_std(column_G) + _STD_EPSILON)
    sums_N = (normalized_NK * torch.tensor(weights, dtype=torch.float64)).nansum(dim=1)
    sums_N = sums_N.masked_fill(rewards_NK.isnan().all(dim=1), math.nan)
    # The rollout's mean is not subtracted: it is zero but for rounding, which would move advantages that are exactly 0.
    return sums_N / (unbiased_std(sums_N) + _STD_EPSILON)


def _mask_low_entropy(per_token: Sequence[Tensor], records: Sequence[Record], quantile: float) -> tuple[Tensor, ...]:
    """Set the advantage to 0 at tokens outside the rollout's highest `quantile` of entropies.

    That silences the policy term only: the KL and the entropy bonus have no advantage.
    """
    loss_masks = [record.completion.loss_mask for record in records]
    entropies = [
        record.entropy[mask] for record, mask in zip(records, loss_masks, strict=True) if record.entropy is not None
    ]
    assert len(entropies) == len(records), "the top-entropy mask needs every sequence's entropies"
    masked = []
    for advantages, mask, is_top in zip(per_token, loss_masks, top_entropy_masks(entropies, quantile), strict=True):
        weights = torch.zeros_like(advantages)
        weights[mask] = is_top.to(weights.dtype)
        masked.append(advantages * weights)
    return tuple(masked)


def top_entropy_masks(entropies: Sequence[Tensor], quantile: float) -> list[Tensor]:
    """Return per tensor 1.0 at tokens among the highest `quantile` of all tokens' entropies, else 0.0.

    `entropy >= torch.quantile(cat(entropies), 1 - quantile)`: one threshold for the rollout's loss tokens (arXiv
    2506.01939). Tokens at the threshold are in. A quantile of 1 takes all tokens.
    """
    values = torch.cat([entropy.flatten() for entropy in entropies]) if entropies else torch.empty(0)
    if values.numel() == 0:
        return [torch.zeros_like(entropy) for entropy in entropies]
    # An order statistic, since torch.quantile refuses more than 2^24 tokens: nothing lies between two neighbours, so
    # the interpolated threshold and the upper neighbour admit the same tokens. The slack keeps 3.0000000000000004 at 3.
    rank = math.ceil((1.0 - quantile) * (values.numel() - 1) - 1e-9)
    threshold = values.kthvalue(max(rank, 0) + 1).values
    # The entropy of one context differs by fp32 rounding between micro-batches.
    return [(entropy >= threshold - _ENTROPY_ROUNDING).to(entropy.dtype) for entropy in entropies]


# Weights of units


def grpo_reduction(settings: GRPOSettings) -> Reduction:
    """Return the weight of a token, or at sequence level of a sequence, whose loss is the mean of its tokens.

    With N sequences and T loss tokens in the step and `length` in the sequence, a token weighs

        grpo, sapo                  1 / (length * N)                  each sequence's mean, averaged over sequences
        luspo                       1 / N                             each sequence's sum, averaged over sequences
        dr_grpo                     1 / (max_completion_length * N)   no length bias
        dapo, bnpo, cispo, vespo    1 / T                             mean over the step's tokens

    `bnpo` equals `dapo` here: TRL's is the mean over a micro-batch, and micro-batches must not change the result.
    """
    token_weight: Reduction = token_mean
    if settings.loss_type in ("grpo", "sapo"):
        token_weight = _mean_of_sequence_means
    elif settings.loss_type == "luspo":
        token_weight = sequence_mean
    elif settings.loss_type == "dr_grpo":
        token_weight = partial(_max_length_mean, settings.max_completion_length)
    elif settings.loss_type not in ("dapo", "bnpo", "cispo", "vespo"):
        raise AssertionError(f"loss_type={settings.loss_type!r} has no weights")
    return partial(_sum_of_tokens, token_weight) if settings.importance_level == "sequence" else token_weight


def _mean_of_sequence_means(length: int, counts: StepCounts) -> float:
    return 1.0 / (length * counts.num_sequences) if length else 0.0


def _max_length_mean(max_length: int, length: int, counts: StepCounts) -> float:
    return 1.0 / (max_length * counts.num_sequences) if length else 0.0


def _sum_of_tokens(token_weight: Reduction, length: int, counts: StepCounts) -> float:
    return length * token_weight(length, counts)


# Loss


def grpo_loss(settings: GRPOSettings, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return `weight * policy + beta * KL` of each token [T], or its mean over each sequence [B] at sequence level.

    The weight is 1, or corrects the sampler's drift (`correction_weight`), or is 0 for a masked sequence. The entropy bonus is
    not part of this loss: it is the mean over the step's tokens for every loss type, and the training step adds it.
    """
    ratio_T = policy_ratio_T = importance_ratio(logprobs_T, tokens, settings.importance_level)
    if settings.importance_level == "sequence" and settings.turn_credit != "outcome":
        policy_ratio_T = ratio_with_token_gradient(ratio_T, logprobs_T)
    loss_T = _policy_term(settings, logprobs_T, policy_ratio_T, tokens)
    if settings.off_policy_mask_threshold is not None:
        loss_T = loss_T * off_policy_mask(logprobs_T, tokens, settings.off_policy_mask_threshold)
    if settings.step_correction is not None:
        loss_T = loss_T * step_weights(settings.step_correction, logprobs_T, tokens)
    if settings.beta != 0.0:
        loss_T = loss_T + settings.beta * _kl_term(settings, logprobs_T, ratio_T, tokens)
    return mean_per_sequence(loss_T, tokens) if settings.importance_level == "sequence" else loss_T


def _policy_term(settings: GRPOSettings, logprobs_T: Tensor, ratio_T: Tensor, tokens: TokenBatch) -> Tensor:
    advantages_T = tokens.advantages_T
    if settings.loss_type == "cispo":
        return _clipped_weight_loss(logprobs_T, ratio_T, advantages_T, settings.clip_high)
    if settings.loss_type == "sapo":
        assert settings.sapo is not None, "SAPO has a gate"
        return _gated_loss(settings.sapo, ratio_T, advantages_T)
    if settings.loss_type == "vespo":
        assert settings.vespo is not None, "VESPO has a weight"
        return -vespo_weights(settings.vespo, logprobs_T, tokens) * advantages_T * logprobs_T
    assert settings.clip_low is not None, "only CISPO has no lower clip"
    return clipped_surrogate(ratio_T, advantages_T, settings.clip_low, settings.clip_high, settings.delta)


def _clipped_weight_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, clip_high: float) -> Tensor:
    """Return CISPO's `-stopgrad(min(ratio, 1 + clip_high)) * A * logprob`, elementwise; it has no floor."""
    return -ratio.detach().clamp(max=1.0 + clip_high) * advantages * logprobs


def _gated_loss(gate: SAPOGate, ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return SAPO's `-4 / tau * sigmoid(tau * (ratio - 1)) * A`, with tau by the sign of A: elementwise.

    At a ratio of 1 the gradient is GRPO's; it vanishes smoothly on both sides.
    """
    temperature = _choose(advantages > 0, gate.positive, gate.negative, ratio.dtype)
    return -4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0)) * advantages


def _choose(condition: Tensor, if_true: float, if_false: float, dtype: torch.dtype) -> Tensor:
    """Return one of two numbers elementwise; torch.where would round them to float32."""
    return torch.full_like(condition, if_false, dtype=dtype).masked_fill(condition, if_true)


def vespo_weights(weight: VESPOWeight, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return VESPO's weight of each token's sequence: [T], without a gradient; 1 if the ratio w is 1.

    `exp(decay) * w^power * exp(-decay * w)` with w = product of policy / old, and of old / sampler if that is corrected.
    """
    old_T = old_logprobs(logprobs_T, tokens)
    log_ratio_T = (logprobs_T.detach() - old_T).clamp(-_VESPO_BOUND, _VESPO_BOUND)
    if weight.correction is not None:
        drift_T = step_weights(weight.correction, logprobs_T, tokens)
        log_ratio_T = log_ratio_T + drift_T.log().clamp(_VESPO_FLOOR, _VESPO_BOUND)
    log_w_B = sum_per_sequence(log_ratio_T, tokens).clamp(_VESPO_FLOOR, _VESPO_BOUND)
    log_w_T = repeat_per_token(log_w_B, tokens)
    gains = tokens.advantages_T >= 0
    power = _choose(gains, weight.positive_power, weight.negative_power, log_w_T.dtype)
    decay = _choose(gains, weight.positive_decay, weight.negative_decay, log_w_T.dtype).clamp(min=_LEAST_DECAY)
    return torch.exp(decay + power * log_w_T - decay * log_w_T.exp())


def _kl_term(settings: GRPOSettings, logprobs_T: Tensor, ratio_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the KL estimate of each token, times its differentiable, unclipped ratio if bias-corrected: [T].

    With the correction the gradient is that of the reverse KL, on-policy too (DeepSeek-V3.2, arXiv 2512.02556).
    """
    assert tokens.reference_T is not None, "a KL needs the reference's log-probs"
    kl_T = kl_estimate(logprobs_T, tokens.reference_T, settings.kl_estimator)
    return kl_T * ratio_T if settings.bias_corrected_kl else kl_T


# Metrics


def measure_grpo(
    settings: GRPOSettings, logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch
) -> dict[str, Metric]:
    """Return clip ratios, the loss's KL, entropy and the sampler's drift.

    `cispo_clip_ratio` is the share of tokens above the ceiling with a positive advantage, as in TRL.
    """
    unit = settings.importance_level
    mask_T = weighted_tokens(tokens, unit)
    ratio_T = importance_ratio(logprobs_T, tokens, settings.importance_level)
    metrics = measure_pass(logprobs_T, entropy_T, tokens, mask_T, settings.step_correction, settings.old_policy)
    if settings.old_policy == "sampler" and settings.correction is None:
        metrics |= measure_sampler(logprobs_T, tokens, mask_T)
    if settings.beta != 0.0:
        metrics["kl"] = masked_mean(_kl_term(settings, logprobs_T, ratio_T, tokens), mask_T)
    if settings.loss_type == "cispo":
        high_T = (ratio_T > 1.0 + settings.clip_high) & (tokens.advantages_T > 0)
        metrics["cispo_clip_ratio"] = mean_over_step(mask_T * high_T, tokens.token_share, tokens)
        return metrics
    if settings.vespo is not None:
        weights_B = value_per_sequence(vespo_weights(settings.vespo, logprobs_T, tokens), tokens)
        metrics["vespo/phi_seq_mean"] = masked_mean(weights_B, value_per_sequence(mask_T, tokens))
        return metrics
    if settings.loss_type == "sapo":
        return metrics
    assert settings.clip_low is not None, "only CISPO has no lower clip"
    return metrics | clip_ratios(ratio_T, tokens, mask_T, unit, settings.clip_low, settings.clip_high)


# Coefficient of the entropy bonus


def initial_entropy_state(bonus: EntropyBonus | None) -> dict[str, float]:
    """Return the adaptive coefficient at the first step: 0, as no entropy is known; nothing without a target."""
    if bonus is None or bonus.target is None:
        return {}
    return {ENTROPY_COEF: 0.0, _ENTROPY_CONTROL: bonus.coef}


def entropy_schedule(bonus: EntropyBonus | None, step: int, epoch: float) -> dict[str, float]:
    """Return the fixed coefficient; nothing if it is adaptive."""
    return {} if bonus is None or bonus.target is not None else {ENTROPY_COEF: bonus.coef}


def next_entropy_state(
    bonus: EntropyBonus | None, state: Mapping[str, float], metrics: Mapping[str, float]
) -> Mapping[str, float]:
    """Return the coefficients after a step with mean token entropy `metrics["entropy"]` (Skywork-OR1, arXiv 2505.22312).

    `entropy_control` moves by `delta` within [minimum, maximum]: up at or below the target, down above. The loss's
    `entropy_coef` is that number at or below the target, and 0 above. Without a target, or after a step without tokens
    (no entropy, or NaN), the state stays.
    """
    entropy = metrics.get("entropy", math.nan)
    if bonus is None or bonus.target is None or math.isnan(entropy):
        return state
    is_low = entropy <= bonus.target
    moved = state[_ENTROPY_CONTROL] + (bonus.delta if is_low else -bonus.delta)
    control = min(max(moved, bonus.minimum), bonus.maximum)
    return {ENTROPY_COEF: control if is_low else 0.0, _ENTROPY_CONTROL: control}

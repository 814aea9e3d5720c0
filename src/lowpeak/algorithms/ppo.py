"""PPO (arXiv 1707.06347) as it is used on language models (Ziegler et al. 2019, arXiv 1909.08593).

    r_t = -beta * KL_t + (the reward at the last token)      fixed for the rollout
    A   = GAE(r, V), whitened over the rollout
    L   = -min(ratio * A, clip(ratio) * A) + vf_coef * 1/2 * max((V - R)^2, (clip(V) - R)^2)

per token, mean over the step's tokens. Different from the paper:
1. The KL to the reference is part of the reward (Ziegler et al., equation 2). Its estimator can be chosen, and its coefficient
   can be adaptive.
2. The value loss is clipped around the old value as in OpenAI's baselines; `cliprange_value=None` is the paper's loss.
3. There is no entropy bonus.
4. A truncated completion ends its episode like any other: no value is bootstrapped.
5. Equation 9's coefficients are c1 = vf_coef / 2 and c2 = 0; value warm-up trains c1's term alone for the first steps.

Shapes: N sequences of the rollout, C tokens of one completion, T loss tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lowpeak.algorithms.algorithm import VALUES_GRADIENT, Advantages, Algorithm, Need, ValueTerm
from lowpeak.algorithms.groups import indices_by_group, reward_metrics, select_all
from lowpeak.algorithms.loss_terms import (
    clipped_surrogate,
    corrected_advantages,
    importance_ratio,
    kl_estimate,
    token_mean,
)
from lowpeak.algorithms.metrics import masked_mean, measure_pass, measure_sampler, weighted_tokens
from lowpeak.arguments import PPOSettings
from lowpeak.batching import scatter
from lowpeak.records import Metric, Record, TokenBatch

_KL_COEF = "kl_coef"
_POLICY_COEF = "policy_coef"
_VARIANCE_EPSILON = 1e-8  # added to a variance before its root divides


def make_ppo(settings: PPOSettings) -> Algorithm:
    """Return PPO; no sequence is skipped, because its values are learned even with zero advantages."""
    needs: dict[Need, bool] = {"old": settings.score_old, "values": True, "reference": settings.beta != 0.0}
    return Algorithm(
        name="ppo",
        unit="token",
        old_policy=settings.old_policy,
        needs=frozenset(need for need, needed in needs.items() if needed),
        select=select_all,
        advantages=partial(_corrected_ppo_advantages, settings),
        reduction=token_mean,
        loss=partial(policy_loss, settings),
        measure=partial(measure_policy, settings),
        values=ValueTerm(partial(value_loss, settings), partial(measure_values, settings)),
        skip_zero_advantage=False,
        state=initial_kl_state(settings),
        update=partial(next_kl_state, settings),
        schedule=partial(value_warmup, settings),
        stop_early=partial(exceeds_early_stop_kl, settings),
    )


# Advantages


def _corrected_ppo_advantages(
    settings: PPOSettings, records: Sequence[Record], coefficients: Mapping[str, float]
) -> Advantages:
    advantages = partial(ppo_advantages, settings, coefficients=coefficients)
    return corrected_advantages(settings, advantages, records, coefficients)


def ppo_advantages(settings: PPOSettings, records: Sequence[Record], coefficients: Mapping[str, float]) -> Advantages:
    """Return GAE over the loss tokens of each completion, computed in float64, whitened over the rollout if set.

    A sequence without a reward (NaN) teaches nothing: its advantages are 0, and its returns are its values.
    """
    masks = [record.completion.loss_mask for record in records]
    kl = [_token_kl(settings, *each) for each in zip(records, masks, strict=True)]
    rewards = [_token_rewards(settings, coefficients, *each) for each in zip(records, kl, masks, strict=True)]
    is_rewarded = [record.reward == record.reward for record in records]  # NaN differs from itself
    if settings.whiten_rewards:
        rewards = list(whiten(rewards, is_rewarded, shift_mean=False))
    values = [_loss_tokens(record.values, mask) for record, mask in zip(records, masks, strict=True)]
    advantages, returns = gae(rewards, values, settings.gamma, settings.gae_lambda)
    advantages = _zero_unrewarded(advantages, is_rewarded)
    returns = tuple(r if s else v for r, v, s in zip(returns, values, is_rewarded, strict=True))
    metrics = _rollout_metrics(settings, records, coefficients, kl, returns, values)
    if settings.whiten_advantages:
        advantages = _zero_unrewarded(whiten(advantages, is_rewarded), is_rewarded)
    return Advantages(_scattered(records, advantages), metrics, _scattered(records, returns))


def gae(
    rewards: Sequence[Tensor], values: Sequence[Tensor], gamma: float, gae_lambda: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return advantages and returns `A_t + V_t` from each completion's rewards and values per token (float64).

        delta_t = r_t + gamma * V_{t+1} - V_t,   A_t = delta_t + gamma * lambda * A_{t+1}

    Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438, equation 16). A completion is an episode: after
    its last token value and advantage are 0, whether it stopped or was truncated.
    """
    lengths = [len(reward) for reward in rewards]
    rewards_NC, values_NC = _pad(rewards), _pad(values)
    # A pad's reward and value are 0, so that its advantage is 0 and adds nothing to the last token's.
    next_values_NC = torch.cat([values_NC[:, 1:], values_NC.new_zeros(len(lengths), 1)], dim=1)
    deltas_NC = rewards_NC + gamma * next_values_NC - values_NC
    advantages_NC = torch.zeros_like(deltas_NC)
    running_N = deltas_NC.new_zeros(len(lengths))
    for t in reversed(range(deltas_NC.shape[1])):
        running_N = deltas_NC[:, t] + gamma * gae_lambda * running_N
        advantages_NC[:, t] = running_N
    advantages = tuple(padded[:length] for padded, length in zip(advantages_NC, lengths, strict=True))
    return advantages, tuple(a + v.double() for a, v in zip(advantages, values, strict=True))


def _pad(values: Sequence[Tensor]) -> Tensor:
    """Pad sequences with 0 on the right: float64 [N, C], C at least 1."""
    # The extra sequence of length 1 gives `pad_sequence` something to pad if there is none, and is removed again.
    return pad_sequence([*(each.double() for each in values), torch.zeros(1, dtype=torch.float64)], batch_first=True)[
        :-1
    ]


def whiten(values: Sequence[Tensor], is_rewarded: Sequence[bool], shift_mean: bool = True) -> tuple[Tensor, ...]:
    """Return `(x - mean) / sqrt(variance + 1e-8)`, with the statistics of rewarded sequences.

    Without `shift_mean` the mean is added again.
    """
    rewarded = [each for each, counts in zip(values, is_rewarded, strict=True) if counts]
    all_values = torch.cat([*rewarded, torch.zeros(0, dtype=torch.float64)])
    mean = all_values.mean() if len(all_values) else all_values.new_zeros(())
    variance = all_values.var() if len(all_values) > 1 else all_values.new_ones(())
    kept_mean = 0.0 if shift_mean else mean
    return tuple((each - mean) * torch.rsqrt(variance + _VARIANCE_EPSILON) + kept_mean for each in values)


def _zero_unrewarded(advantages: Sequence[Tensor], is_rewarded: Sequence[bool]) -> tuple[Tensor, ...]:
    return tuple(each * rewarded for each, rewarded in zip(advantages, is_rewarded, strict=True))


def _token_kl(settings: PPOSettings, record: Record, mask: Tensor) -> Tensor:
    """Return the KL of each loss token between old and reference; zeros without a reference."""
    if settings.beta == 0.0:
        return torch.zeros(int(mask.sum()), dtype=torch.float64)
    return kl_estimate(_loss_tokens(record.old, mask), _loss_tokens(record.reference, mask), settings.kl_estimator)


def _token_rewards(
    settings: PPOSettings, coefficients: Mapping[str, float], record: Record, kl: Tensor, mask: Tensor
) -> Tensor:
    """Return `-beta * KL` of each loss token plus its reward; the last one gets the sequence's score.

    Rewards that functions gave to single tokens stay at these tokens, and the last token gets the rest of the score.
    """
    rewards = -_kl_coefficient(settings, coefficients) * kl if settings.beta else kl.clone()
    if record.token_rewards is not None:
        rewards = rewards + _loss_tokens(record.token_rewards, mask)
    score = _penalized_reward(settings, record)
    if len(rewards) and score == score:  # not NaN; the advantages of a sequence without a reward are left out
        rewards[-1] += score - _sum_of_token_rewards(record, mask)
    return rewards


def _kl_coefficient(settings: PPOSettings, coefficients: Mapping[str, float]) -> float:
    return coefficients.get(_KL_COEF, settings.beta)


def _penalized_reward(settings: PPOSettings, record: Record) -> float:
    return record.reward - (settings.missing_eos_penalty if record.completion.finish_reason != "stop" else 0.0)


def _sum_of_token_rewards(record: Record, mask: Tensor) -> float:
    return 0.0 if record.token_rewards is None else float(_loss_tokens(record.token_rewards, mask).sum())


def _loss_tokens(values: Tensor | None, mask: Tensor) -> Tensor:
    assert values is not None, "a rollout is scored before its advantages"
    return values.double()[mask]


def _scattered(records: Sequence[Record], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(scatter(record, each) for record, each in zip(records, values, strict=True))


def _rollout_metrics(
    settings: PPOSettings,
    records: Sequence[Record],
    coefficients: Mapping[str, float],
    kl: Sequence[Tensor],
    returns: Sequence[Tensor],
    values: Sequence[Tensor],
) -> dict[str, Metric]:
    """Return `objective/*` of TRL's former trainer, per completion, and the returns' variance that the values explain."""
    num_sequences = float(len(records))
    scores = [s for record in records if (s := _penalized_reward(settings, record)) == s]
    all_returns, all_values = torch.cat(list(returns)), torch.cat(list(values))
    variance = float(all_returns.var()) if len(all_returns) > 1 else 0.0
    metrics = reward_metrics(records)
    if len(indices_by_group(records)) == len(records):  # rewards of a group of one are always equal
        del metrics["frac_reward_zero_std"]
    metrics["objective/scores"] = Metric(sum(scores), float(len(scores)))
    metrics["value/mean"] = Metric(float(all_values.sum()), float(len(all_values)))
    if variance:
        unexplained = float((all_returns - all_values).var()) / variance
        metrics["value/explained_variance"] = Metric(1.0 - unexplained)
    if settings.beta:
        total = float(sum(each.sum() for each in kl))
        metrics["kl"] = Metric(total, float(sum(len(each) for each in kl)))
        metrics["objective/kl"] = Metric(total, num_sequences)
        coefficient = _kl_coefficient(settings, coefficients)
        metrics["objective/non_score_reward"] = Metric(-coefficient * total, num_sequences)
        metrics["objective/rlhf_reward"] = Metric(sum(scores) - coefficient * total, num_sequences)
        metrics["kl_coef"] = Metric(coefficient)
    return metrics


# Losses


def policy_loss(settings: PPOSettings, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the clipped surrogate of each token (equation 7): [T]; times 0 during value warm-up."""
    ratio_T = importance_ratio(logprobs_T, tokens, "token")
    loss_T = clipped_surrogate(ratio_T, tokens.advantages_T, settings.clip_low, settings.clip_high)
    return loss_T * tokens.coefficients.get(_POLICY_COEF, 1.0)


def value_loss(settings: PPOSettings, values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return `vf_coef / 2 * max((V - R)^2, (clip(V, old V - c, old V + c) - R)^2)` of each token: [T]."""
    assert tokens.returns_T is not None, "values are trained towards returns"
    loss_T = (values_T - tokens.returns_T).square()
    if settings.value_clip is not None:
        loss_T = torch.maximum(loss_T, (_clipped(settings.value_clip, values_T, tokens) - tokens.returns_T).square())
    return 0.5 * settings.value_coef * loss_T


def _clipped(value_clip: float, values_T: Tensor, tokens: TokenBatch) -> Tensor:
    assert tokens.values_T is not None, "values are clipped around those of the rollout"
    return tokens.values_T + (values_T - tokens.values_T).clamp(-value_clip, value_clip)


# Metrics


def measure_policy(
    settings: PPOSettings, logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch
) -> dict[str, Metric]:
    """Return `policy/*` and `val/ratio` of TRL's former trainer.

    `approxkl_avg` is the mean of half the squared log-ratio.
    """
    mask_T = weighted_tokens(tokens, "token")
    ratio_T = importance_ratio(logprobs_T, tokens, "token")
    surrogate_T = clipped_surrogate(ratio_T, tokens.advantages_T, settings.clip_low, settings.clip_high)
    is_clipped_T = surrogate_T > -ratio_T * tokens.advantages_T
    metrics = measure_pass(logprobs_T, entropy_T, tokens, mask_T, old_policy=settings.old_policy)
    if settings.old_policy == "sampler" and settings.correction is None:
        metrics |= measure_sampler(logprobs_T, tokens, mask_T)
    return metrics | {
        "policy/approxkl_avg": masked_mean(0.5 * ratio_T.log().square(), mask_T),
        "policy/clipfrac_avg": masked_mean(is_clipped_T.to(mask_T.dtype), mask_T),
        "loss/policy_avg": masked_mean(surrogate_T, mask_T),
        "val/ratio": masked_mean(ratio_T, mask_T),
    }


def measure_values(settings: PPOSettings, values_T: Tensor, tokens: TokenBatch) -> dict[str, Metric]:
    """Return the value loss without its coefficient, and the share of tokens whose value is clipped."""
    mask_T = weighted_tokens(tokens, "token")
    assert tokens.returns_T is not None, "values are trained towards returns"
    error_T = (values_T - tokens.returns_T).square()
    metrics = {"loss/value_avg": masked_mean(0.5 * error_T, mask_T)}
    if settings.value_clip is not None:
        is_clipped_T = (_clipped(settings.value_clip, values_T, tokens) - tokens.returns_T).square() > error_T
        metrics["val/clipfrac_avg"] = masked_mean(is_clipped_T.to(mask_T.dtype), mask_T)
    return metrics


# Adaptive KL, value warm-up and early stopping


def initial_kl_state(settings: PPOSettings) -> dict[str, float]:
    """Return the KL coefficient, if it is adaptive."""
    return {} if settings.adaptive_kl is None else {_KL_COEF: settings.beta}


def next_kl_state(
    settings: PPOSettings, state: Mapping[str, float], metrics: Mapping[str, float]
) -> Mapping[str, float]:
    """Return the coefficient after a proportional update by the rollout's KL (Ziegler et al., section 2.2).

    Only the first step of a rollout has the metric, so the coefficient changes once a rollout.
    """
    adaptive = settings.adaptive_kl
    if adaptive is None or "objective/kl" not in metrics:
        return state
    error = min(0.2, max(-0.2, metrics["objective/kl"] / adaptive.target - 1.0))
    return {_KL_COEF: state[_KL_COEF] * (1.0 + error * adaptive.num_sequences / adaptive.horizon)}


def value_warmup(settings: PPOSettings, step: int, epoch: float) -> dict[str, float]:
    """Return 0 for the policy term and for the values' gradient into the policy's backbone during warm-up, then 1."""
    coefficient = float(step >= settings.value_warmup_steps)
    return {_POLICY_COEF: coefficient, VALUES_GRADIENT: coefficient}


def exceeds_early_stop_kl(settings: PPOSettings, metrics: Mapping[str, float]) -> bool:
    """Return whether the policy moved too far from the rollout's, so that its other steps are skipped."""
    limit = settings.early_stop_kl
    return limit is not None and metrics["policy/approxkl_avg"] > limit

"""PPO (Schulman et al. 2017, arXiv 1707.06347) as it is used on language models (Ziegler et al. 2019, arXiv 1909.08593).

    r_t = -beta * KL_t + (the reward at the last token)      fixed for the rollout
    A   = GAE(r, V), whitened over the rollout
    L   = -min(ratio * A, clip(ratio) * A) + vf_coef * 1/2 * max((V - R)^2, (clip(V) - R)^2)

per token, mean over the step's tokens. Different from the paper:
1. The KL to the reference is a part of the reward (Ziegler et al., equation 2), its estimator can be chosen and its
   coefficient steered.
2. The value's loss is clipped around the old value as OpenAI's baselines do; `cliprange_value=None` is the paper's.
3. There is no entropy bonus.
4. A completion cut by its length ends there like any other: nothing is bootstrapped.
5. Equation 9's coefficients are c1 = vf_coef / 2, c2 = 0; value warm-up trains c1's term alone for some steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lowpeak.algorithms.advantages import reward_metrics
from lowpeak.algorithms.algorithm import VALUES_GRADIENT, Advantages, Algorithm, Need, ValueTerm
from lowpeak.algorithms.group_filter import loss_mask, rows_by_group, select_all
from lowpeak.algorithms.importance import importance_ratio
from lowpeak.algorithms.kl import kl_estimate
from lowpeak.algorithms.losses import clipped_surrogate
from lowpeak.algorithms.metrics import counted_tokens, mean_of, measure_pass
from lowpeak.algorithms.reduction import token_mean
from lowpeak.algorithms.rollout_correction import corrected_advantages
from lowpeak.arguments import PPOSettings
from lowpeak.records import Metric, Record, TokenBatch

_KL_COEF = "kl_coef"
_POLICY_COEF = "policy_coef"
_VARIANCE = 1e-8  # added to a variance before its root divides


def make_ppo(settings: PPOSettings) -> Algorithm:
    """PPO as functions of tensors; no row is idle, since its values are learned from whatever its advantage is."""
    needs: dict[Need, bool] = {"old": settings.score_old, "values": True, "reference": settings.beta != 0.0}
    return Algorithm(
        name="ppo",
        unit="token",
        needs=frozenset(need for need, needed in needs.items() if needed),
        select=select_all,
        advantages=partial(weighed_advantages, settings),
        reduction=token_mean,
        loss=partial(policy_loss, settings),
        measure=partial(measure_policy, settings),
        values=ValueTerm(partial(value_loss, settings), partial(measure_values, settings)),
        idle=False,
        state=start_state(settings),
        update=partial(next_state, settings),
        schedule=partial(warm_up, settings),
        spent=partial(is_spent, settings),
    )


# station 9


def weighed_advantages(settings: PPOSettings, records: Sequence[Record], state: Mapping[str, float]) -> Advantages:
    """`ppo_advantages`, weighed where the engine's drift is corrected."""
    return corrected_advantages(settings, partial(ppo_advantages, settings, state=state), records, state)


def ppo_advantages(settings: PPOSettings, records: Sequence[Record], state: Mapping[str, float]) -> Advantages:
    """GAE over the counted tokens of each completion, computed in float64, whitened over the rollout where asked for.

    A row that nobody scored (reward NaN) teaches nothing: advantage 0, and its returns are its values.
    """
    masks = [loss_mask(record.completion, settings.mask_truncated) for record in records]
    kl = [_kl(settings, *each) for each in zip(records, masks, strict=True)]
    rewards = [_token_rewards(settings, state, *each) for each in zip(records, kl, masks, strict=True)]
    scored = [record.reward == record.reward for record in records]
    if settings.whiten_rewards:
        rewards = list(whitened(rewards, scored, shift_mean=False))
    values = [_counted(record.values, mask) for record, mask in zip(records, masks, strict=True)]
    advantages, returns = gae(rewards, values, settings.gamma, settings.gae_lambda)
    advantages = _where_scored(advantages, scored)
    returns = tuple(r if s else v for r, v, s in zip(returns, values, scored, strict=True))
    metrics = _metrics(settings, records, state, kl, returns, values)
    if settings.whiten_advantages:
        advantages = _where_scored(whitened(advantages, scored), scored)
    return Advantages(_in_place(advantages, masks), metrics, _in_place(returns, masks))


def gae(
    rewards: Sequence[Tensor], values: Sequence[Tensor], gamma: float, gae_lambda: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Advantages, and returns `A_t + V_t`, of each completion's rewards and values per token, in float64.

        delta_t = r_t + gamma * V_{t+1} - V_t,   A_t = delta_t + gamma * lambda * A_{t+1}

    Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438, equation 16). A completion is an episode: after
    its last token the value and the advantage are 0, whether it ended by itself or was cut. N completions, C tokens of the
    longest, all at once from the end to the beginning.
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


def whitened(rows: Sequence[Tensor], counts: Sequence[bool], shift_mean: bool = True) -> tuple[Tensor, ...]:
    """`(x - mean) / sqrt(variance + 1e-8)` by all values of the rows that count, the mean kept without `shift_mean`."""
    counted = [row for row, counts_too in zip(rows, counts, strict=True) if counts_too]
    values = torch.cat([*counted, torch.zeros(0, dtype=torch.float64)])
    mean = values.mean() if len(values) else values.new_zeros(())
    variance = values.var() if len(values) > 1 else values.new_ones(())
    kept = 0.0 if shift_mean else mean
    return tuple((row - mean) * torch.rsqrt(variance + _VARIANCE) + kept for row in rows)


def _where_scored(advantages: Sequence[Tensor], scored: Sequence[bool]) -> tuple[Tensor, ...]:
    """The rows' advantages, 0 where nobody scored the row."""
    return tuple(row * is_scored for row, is_scored in zip(advantages, scored, strict=True))


def _kl(settings: PPOSettings, record: Record, mask: Tensor) -> Tensor:
    """The KL of each counted token, between old and reference; zeros without a reference."""
    if settings.beta == 0.0:
        return torch.zeros(int(mask.sum()), dtype=torch.float64)
    return kl_estimate(_counted(record.old, mask), _counted(record.reference, mask), settings.kl_estimator)


def _token_rewards(
    settings: PPOSettings, state: Mapping[str, float], record: Record, kl: Tensor, mask: Tensor
) -> Tensor:
    """`-beta * KL` at each counted token; the reward, less the penalty of one that did not end, at the last one.

    What a reward function gave for single tokens stands where it gave it.
    """
    rewards = -_kl_coefficient(settings, state) * kl if settings.beta else kl.clone()
    if record.token_rewards is not None:
        rewards = rewards + _counted(record.token_rewards, mask)
    score = _score(settings, record)
    if len(rewards) and score == score:  # NaN: nobody scored it, and its advantages are left out
        rewards[-1] += score - _of_tokens(record, mask)
    return rewards


def _kl_coefficient(settings: PPOSettings, state: Mapping[str, float]) -> float:
    """The steered coefficient, or `beta`."""
    return state.get(_KL_COEF, settings.beta)


def _score(settings: PPOSettings, record: Record) -> float:
    return record.reward - (settings.missing_eos_penalty if record.completion.finish_reason != "stop" else 0.0)


def _of_tokens(record: Record, mask: Tensor) -> float:
    """How much of the reward is at tokens that count."""
    return 0.0 if record.token_rewards is None else float(_counted(record.token_rewards, mask).sum())


def _counted(values: Tensor | None, mask: Tensor) -> Tensor:
    assert values is not None, "a rollout is scored before its advantages"
    return values.double()[mask]


def _in_place(rows: Sequence[Tensor], masks: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Values of counted tokens in their places of the completion, 0 elsewhere: float32 [C]."""
    found = []
    for row, mask in zip(rows, masks, strict=True):
        full = torch.zeros(len(mask))
        full[mask] = row.float()
        found.append(full)
    return tuple(found)


def _metrics(
    settings: PPOSettings,
    records: Sequence[Record],
    state: Mapping[str, float],
    kl: Sequence[Tensor],
    returns: Sequence[Tensor],
    values: Sequence[Tensor],
) -> dict[str, Metric]:
    """The old TRL trainer's `objective/*`, per completion, and how much of the returns the values explain."""
    num_rows = float(len(records))
    scores = [s for record in records if (s := _score(settings, record)) == s]
    all_returns, all_values = torch.cat(list(returns)), torch.cat(list(values))
    variance = float(all_returns.var()) if len(all_returns) > 1 else 0.0
    metrics = reward_metrics(records)
    if len(rows_by_group(records)) == len(records):  # a group of one has nothing to differ from
        del metrics["frac_reward_zero_std"]
    metrics["objective/scores"] = Metric(sum(scores), float(len(scores)))
    metrics["value/mean"] = Metric(float(all_values.sum()), float(len(all_values)))
    if variance:
        unexplained = float((all_returns - all_values).var()) / variance
        metrics["value/explained_variance"] = Metric(1.0 - unexplained)
    if settings.beta:
        total = float(sum(row.sum() for row in kl))
        metrics["kl"] = Metric(total, float(sum(len(row) for row in kl)))
        metrics["objective/kl"] = Metric(total, num_rows)
        coefficient = _kl_coefficient(settings, state)
        metrics["objective/non_score_reward"] = Metric(-coefficient * total, num_rows)
        metrics["objective/rlhf_reward"] = Metric(sum(scores) - coefficient * total, num_rows)
        metrics["kl_coef"] = Metric(coefficient)
    return metrics


# station 11


def policy_loss(settings: PPOSettings, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """The clipped surrogate of each token (arXiv 1707.06347, equation 7): [T]; times 0 while values warm up."""
    ratio_T = importance_ratio(logprobs_T, tokens, "token")
    loss_T = clipped_surrogate(ratio_T, tokens.advantages_T, settings.clip_low, settings.clip_high)
    return loss_T * tokens.coefficients.get(_POLICY_COEF, 1.0)


def value_loss(settings: PPOSettings, values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """`vf_coef / 2 * max((V - R)^2, (clip(V, old V - c, old V + c) - R)^2)` of each token: [T]."""
    assert tokens.returns_T is not None, "values are trained towards returns"
    loss_T = (values_T - tokens.returns_T).square()
    if settings.value_clip is not None:
        loss_T = torch.maximum(loss_T, (_clipped(settings.value_clip, values_T, tokens) - tokens.returns_T).square())
    return 0.5 * settings.value_coef * loss_T


def _clipped(value_clip: float, values_T: Tensor, tokens: TokenBatch) -> Tensor:
    assert tokens.values_T is not None, "values are clipped around those of the rollout"
    return tokens.values_T + (values_T - tokens.values_T).clamp(-value_clip, value_clip)


def measure_policy(
    settings: PPOSettings, logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch
) -> dict[str, Metric]:
    """The old TRL trainer's `policy/*` and `val/ratio`: `approxkl_avg` is the mean of half the squared log-ratio."""
    counted_T = counted_tokens(tokens, "token")
    ratio_T = importance_ratio(logprobs_T, tokens, "token")
    surrogate_T = clipped_surrogate(ratio_T, tokens.advantages_T, settings.clip_low, settings.clip_high)
    clipped_T = surrogate_T > -ratio_T * tokens.advantages_T
    return measure_pass(logprobs_T, entropy_T, tokens, counted_T) | {
        "policy/approxkl_avg": mean_of(0.5 * ratio_T.log().square(), counted_T),
        "policy/clipfrac_avg": mean_of(clipped_T.to(counted_T.dtype), counted_T),
        "loss/policy_avg": mean_of(surrogate_T, counted_T),
        "val/ratio": mean_of(ratio_T, counted_T),
    }


def measure_values(settings: PPOSettings, values_T: Tensor, tokens: TokenBatch) -> dict[str, Metric]:
    """The value loss without its coefficient, and the share of tokens whose value the clip holds."""
    counted_T = counted_tokens(tokens, "token")
    assert tokens.returns_T is not None, "values are trained towards returns"
    plain_T = (values_T - tokens.returns_T).square()
    metrics = {"loss/value_avg": mean_of(0.5 * plain_T, counted_T)}
    if settings.value_clip is not None:
        held_T = (_clipped(settings.value_clip, values_T, tokens) - tokens.returns_T).square() > plain_T
        metrics["val/clipfrac_avg"] = mean_of(held_T.to(counted_T.dtype), counted_T)
    return metrics


# the algorithm's own numbers


def start_state(settings: PPOSettings) -> dict[str, float]:
    """The KL coefficient, where it is steered."""
    return {} if settings.adaptive_kl is None else {_KL_COEF: settings.beta}


def next_state(settings: PPOSettings, state: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
    """The coefficient steered by the rollout's KL, at its first step."""
    adaptive = settings.adaptive_kl
    if adaptive is None or "objective/kl" not in metrics:
        return state
    error = min(0.2, max(-0.2, metrics["objective/kl"] / adaptive.target - 1.0))
    return {_KL_COEF: state[_KL_COEF] * (1.0 + error * adaptive.num_rows / adaptive.horizon)}


def warm_up(settings: PPOSettings, step: int, epoch: float) -> dict[str, float]:
    """While values warm up, a policy term of 0 and no gradient into the policy's backbone; 1 after that."""
    warm = float(step >= settings.value_warmup_steps)
    return {_POLICY_COEF: warm, VALUES_GRADIENT: warm}


def is_spent(settings: PPOSettings, metrics: Mapping[str, float]) -> bool:
    """Whether the policy has moved so far from the rollout's that its other steps are left out."""
    limit = settings.early_stop_kl
    return limit is not None and metrics["policy/approxkl_avg"] > limit

"""PPO against loops in float64: GAE, whitening, rewards per token, both clipped losses, the adaptive KL."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import record

import step_settings
from lowpeak.algorithms.algorithm import VALUES_GRADIENT
from lowpeak.algorithms.groups import with_loss_masks
from lowpeak.algorithms.ppo import gae, make_ppo, ppo_advantages, whiten
from lowpeak.arguments.ppo import AdaptiveKL
from lowpeak.records import TokenBatch

PPO = replace(step_settings.PPO, gamma=0.9, gae_lambda=0.8, clip_high=0.3, whiten_advantages=False)
STATE = {"kl_coef": 0.1}


def draws(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]


def plain_gae(rewards, values, gamma, lam):
    """Return equation 16 of arXiv 1506.02438 as a sum over later deltas."""
    following = [*values, 0.0][1:]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def scored(rewards, lengths, seed=0, **changes):
    """Return records with these rewards and lengths, values, old and reference log-probs."""
    values, old, reference = (draws(lengths, seed + k) for k in range(3))
    return [
        replace(record(i, reward, length=n), values=v.float(), old=o.float(), reference=f.float(), **changes)
        for i, (reward, n, v, o, f) in enumerate(zip(rewards, lengths, values, old, reference, strict=True))
    ]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.5, 0.0)])
def test_gae_is_the_papers_sum_for_completions_of_any_length(gamma, lam):
    lengths = [5, 1, 0, 9, 2]
    rewards, values = draws(lengths), draws(lengths, 1)
    advantages, returns = gae(rewards, values, gamma, lam)
    for r, v, a, target in zip(rewards, values, advantages, returns, strict=True):
        expected = torch.tensor(plain_gae(r.tolist(), v.tolist(), gamma, lam), dtype=torch.float64)
        torch.testing.assert_close(a, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(target, expected + v, rtol=1e-12, atol=1e-12)
    assert gae([], [], gamma, lam) == ((), ())


def test_whitening_is_over_all_tokens_of_the_rollout():
    rows = draws([3, 0, 5])
    everything = torch.cat(rows)
    for shift, mean in ((True, 0.0), (False, float(everything.mean()))):
        found = torch.cat(whiten(rows, [True] * 3, shift_mean=shift))
        assert float(found.mean()) == pytest.approx(mean, abs=1e-12)
        assert float(found.std()) == pytest.approx(1.0, rel=1e-6)


def test_the_reward_is_at_the_last_token_and_the_kl_at_each():
    records = scored([2.0, -1.0], [4, 2])
    found = ppo_advantages(replace(PPO, beta=0.05), records, STATE)
    for each, advantages, returns in zip(records, found.per_token, found.returns, strict=True):
        rewards = (-0.1 * (each.old.double() - each.reference.double())).tolist()  # the state's coefficient, not beta
        rewards[-1] += each.reward
        expected = plain_gae(rewards, each.values.double().tolist(), 0.9, 0.8)
        torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(returns, torch.tensor(expected) + each.values, rtol=1e-6, atol=1e-6)


def test_a_truncated_completion_loses_the_penalty():
    ended, cut = scored([1.0, 1.0], [3, 3])
    cut = replace(cut, completion=replace(cut.completion, finish_reason="length"), values=ended.values)
    fined = replace(PPO, missing_eos_penalty=0.25, gamma=1.0, gae_lambda=1.0)
    whole, less = ppo_advantages(fined, [ended, cut], STATE).returns
    torch.testing.assert_close(whole - less, torch.full((3,), 0.25))


@pytest.mark.parametrize(
    ("extra", "mask", "rewards"),
    [
        ([0.5, 0.0, -1.0, 0.25, 0.0], [True] * 5, [0.5, 0.0, -1.0, 0.25, 3.0]),  # where single tokens have theirs
        (None, [True, False, False, True, True], [0.0, 0.0, 3.0]),  # tokens of another are no steps of the episode
    ],
)
def test_token_rewards_are_at_their_tokens_and_the_rest_at_the_last_loss_token(extra, mask, rewards):
    mask = torch.tensor(mask)
    (each,) = scored([3.0 + sum(extra or ())], [5], token_rewards=None if extra is None else torch.tensor(extra))
    each = replace(each, completion=replace(each.completion, loss_mask=mask))
    (advantages,) = ppo_advantages(PPO, [each], STATE).per_token
    expected = torch.tensor(plain_gae(rewards, each.values[mask].double().tolist(), 0.9, 0.8))
    torch.testing.assert_close(advantages[mask], expected, rtol=1e-6, atol=1e-6)
    assert not advantages[~mask].any()


def test_an_unscored_sequence_has_advantage_zero_and_its_values_as_returns():
    records = scored([math.nan, 1.0], [3, 3])
    found = ppo_advantages(replace(PPO, whiten_advantages=True), records, STATE)
    assert found.per_token[0].tolist() == [0.0] * 3
    torch.testing.assert_close(found.returns[0], records[0].values)


@pytest.mark.parametrize("whiten", ["whiten_advantages", "whiten_rewards"])
def test_whitening_uses_statistics_of_scored_sequences(whiten):
    settings, records = replace(PPO, **{whiten: True}), scored([math.nan, 1.0, 3.0], [3, 3, 4])
    found, alone = (ppo_advantages(settings, rows, STATE).per_token for rows in (records, records[1:]))
    torch.testing.assert_close(found[1:], alone)


def test_a_nan_from_the_reference_is_not_hidden():
    record = scored([1.0], [3])[0]
    broken = replace(record, reference=torch.full((3,), math.nan))
    assert ppo_advantages(replace(PPO, beta=0.1), [broken], STATE).per_token[0].isnan().all()


def test_masked_truncated_completions_have_no_loss_token():
    records = scored([1.0, 1.0], [3, 2])
    records[0] = replace(records[0], completion=replace(records[0].completion, finish_reason="length"))
    for mask in (False, True):
        found = ppo_advantages(PPO, with_loss_masks(records, mask), STATE)
        assert bool(found.per_token[0].any()) is not mask


def batch(seed=0, tokens=40):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(tokens, generator=generator, dtype=torch.float64)

    old, values = draw() - 2, draw()
    constants = TokenBatch(
        sequences_T=torch.zeros(tokens, dtype=torch.int64),
        num_sequences=1,
        weights_U=torch.full((tokens,), 1.0 / tokens, dtype=torch.float64),
        advantages_T=draw(),
        old_T=old,
        values_T=values,
        returns_T=values + draw(),
    )
    return (old + 0.4 * draw()).requires_grad_(), (values + 0.4 * draw()).requires_grad_(), constants


def assert_same(loss, plain, leaf):
    """Compare a loss and its gradient with the terms of a plain loop; return the gradient."""
    torch.testing.assert_close(loss, torch.stack(plain), rtol=1e-12, atol=1e-12)
    ours, expected = (torch.autograd.grad(x.sum(), leaf)[0] for x in (loss, torch.stack(plain)))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    return ours


def test_the_policy_loss_is_the_papers_equation_7_and_so_is_its_gradient():
    logprobs, _, tokens = batch()
    expected = []
    for p, old, advantage in zip(logprobs, tokens.old_T, tokens.advantages_T, strict=True):
        ratio = (p - old).exp()
        expected.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage))
    gradient = assert_same(make_ppo(PPO).loss(logprobs, tokens), expected, logprobs)
    assert 0 < float((gradient == 0).double().mean()) < 1


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_is_the_larger_of_the_plain_and_the_clipped_error(clip):
    _, values, tokens = batch()
    term = make_ppo(replace(PPO, value_clip=clip)).values
    expected = []
    for v, old, target in zip(values, tokens.values_T, tokens.returns_T, strict=True):
        plain = (v - target) ** 2
        if clip is not None:
            held = old + torch.clamp(v - old, -clip, clip)
            plain = torch.max(plain, (held - target) ** 2)
        expected.append(0.5 * 0.5 * plain)
    gradient = assert_same(term.loss(values, tokens), expected, values)
    if clip is not None:
        share = float((gradient == 0).double().mean())
        assert 0 < share < 1
        assert term.measure(values.detach(), tokens)["val/clipfrac_avg"].value() == pytest.approx(share)


def test_the_coefficient_follows_the_kl_in_steps_of_a_fifth_at_most():
    algorithm = make_ppo(replace(PPO, beta=0.1, adaptive_kl=AdaptiveKL(2.0, 100, 50)))
    for kl, factor in ((2.0, 1.0), (2.2, 1 + 0.1 * 0.5), (9.0, 1.1), (0.0, 0.9)):
        found = algorithm.update(algorithm.state, {"objective/kl": kl})
        assert found["kl_coef"] == pytest.approx(0.1 * factor)
    assert algorithm.update(algorithm.state, {})["kl_coef"] == 0.1  # a later step of the same rollout


def test_during_value_warmup_the_policy_has_no_loss_and_no_gradient():
    algorithm = make_ppo(replace(PPO, value_warmup_steps=2))
    logprobs, _, tokens = batch()
    for step in range(4):
        coefficients = algorithm.coefficients(step=step)
        loss = algorithm.loss(logprobs, replace(tokens, coefficients=coefficients))
        assert bool(loss.any()) == (step >= 2)
        assert coefficients[VALUES_GRADIENT] == float(step >= 2)


def test_a_rollout_stops_early_if_the_policy_moved_too_far():
    assert not make_ppo(PPO).stop_early({"policy/approxkl_avg": 9.0})
    algorithm = make_ppo(replace(PPO, early_stop_kl=0.02))
    assert algorithm.stop_early({"policy/approxkl_avg": 0.03})
    assert not algorithm.stop_early({"policy/approxkl_avg": 0.02})


def test_metrics_are_those_of_trls_former_trainer():
    records = scored([2.0, -1.0], [4, 2])
    metrics = ppo_advantages(replace(PPO, beta=0.05), records, STATE).metrics
    kl = sum(float((each.old - each.reference).sum()) for each in records)
    assert metrics["objective/kl"].value() == pytest.approx(kl / 2, rel=1e-5)
    assert metrics["objective/non_score_reward"].value() == pytest.approx(-0.1 * kl / 2, rel=1e-5)
    assert metrics["objective/rlhf_reward"].value() == pytest.approx(0.5 - 0.1 * kl / 2, rel=1e-5)
    assert metrics["kl"].value() == pytest.approx(kl / 6, rel=1e-5)
    logprobs, _, tokens = batch()
    found = make_ppo(PPO).measure(logprobs.detach(), None, tokens)
    log_ratio = logprobs.detach() - tokens.old_T
    assert found["policy/approxkl_avg"].value() == pytest.approx(float((0.5 * log_ratio**2).mean()))
    assert found["val/ratio"].value() == pytest.approx(float(log_ratio.exp().mean()))

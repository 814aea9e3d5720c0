"""Advantages per turn and their losses, against naive definitions, and equal to the outcome's where they must be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import GRPO, RLOO, gradients, ragged_rows, trained_loss

from lowpeak.algorithms.grpo import grpo_advantages, make_grpo
from lowpeak.algorithms.rloo import make_rloo, rloo_advantages
from lowpeak.algorithms.turn_credit import turn_ranges
from lowpeak.records import Completion, Record

MASKS = ([1, 1, 0, 0, 1, 0, 1, 1], [1, 0, 1], [1, 1])
ADVANTAGES = {"grpo": (grpo_advantages, replace(GRPO, scale_rewards="none")), "rloo": (rloo_advantages, RLOO)}
SEQUENCE_LOSSES = {"gspo": (make_grpo, replace(GRPO, importance_level="sequence")), "rloo": (make_rloo, RLOO)}


def record(mask, reward, token_rewards=None, group=0):
    size = len(mask)
    completion = Completion(torch.zeros(size, dtype=torch.int32), torch.zeros(size), torch.tensor(mask).bool(), "stop")
    tokens = None if token_rewards is None else torch.tensor(token_rewards)
    return Record(group, (1,), completion, (reward,), reward, token_rewards=tokens)


def with_kl(each, kl):
    """The record with old and reference log-probs whose k1 is `kl` in all."""
    zeros = torch.zeros(len(each.completion))
    return replace(each, old=torch.full_like(zeros, kl / int(each.completion.loss_mask.sum())), reference=zeros)


def test_turns_are_the_runs_of_sampled_tokens():
    assert turn_ranges(torch.tensor(MASKS[0]).bool()) == [(0, 2), (4, 5), (6, 8)]
    assert turn_ranges(torch.zeros(3).bool()) == []


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        *(("grpo", {"scale_rewards": scale}) for scale in ("group", "batch", "none")),
        *(("rloo", changes) for changes in ({"normalize_advantages": True}, {"beta": 0.1})),
    ],
)
def test_discount_1_with_an_outcome_alone_equals_the_outcomes_advantages_to_the_bit(algorithm, changes):
    rewards = (1.0, 0.3, float("nan"), 0.7, 0.7, 0.9)
    records = [
        with_kl(record(mask, reward, group=i // 3), 0.25)
        for i, (mask, reward) in enumerate(zip([*MASKS, *MASKS], rewards, strict=True))
    ]
    advantages, settings = ADVANTAGES[algorithm]
    settings = replace(settings, **changes)
    outcome = advantages(settings, records).per_token
    per_turn = advantages(replace(settings, turn_credit="discounted"), records).per_token
    for one, other, each in zip(outcome, per_turn, records, strict=True):
        mask = each.completion.loss_mask
        assert torch.equal(one[mask], other[mask])


def naive(credit, discount, turn_rewards, outcomes, leaves_one_out):
    """The advantages of each completion's turns; a completion whose outcome is NaN has none and is in no mean."""
    known = [i for i, outcome in enumerate(outcomes) if not math.isnan(outcome)]

    def less_mean(values, i):
        others = [values[j] for j in known if values[j] is not None and not (leaves_one_out and j == i)]
        return values[i] - sum(others) / len(others) if others else 0.0

    advantages = [[0.0] * len(each) for each in turn_rewards]
    for i in known:
        for k in range(len(turn_rewards[i])):
            if credit == "turn":
                column = [each[k] if k < len(each) else None for each in turn_rewards]
                advantages[i][k] = less_mean(column, i) + less_mean(outcomes, i)
            else:
                returns = []
                for each, outcome in zip(turn_rewards, outcomes, strict=True):
                    first = min(k, len(each) - 1)
                    rewards = [*each[first:-1], each[-1] + outcome]
                    returns.append(sum(discount**n * reward for n, reward in enumerate(rewards)))
                advantages[i][k] = less_mean(returns, i)
    return advantages


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("credit", ["turn", "discounted"])
def test_advantages_of_turns_follow_their_formulas(algorithm, credit):
    # Rewards of turns 1, 0, 2 and an outcome of 4; 3, 0 and 1; 5 and 0; 6, 6, 6 without a reward.
    group = [
        record(MASKS[0], 7.0, [0.0, 1, 0, 0, 0, 0, 2, 0]),
        record(MASKS[1], 4.0, [3.0, 0, 0]),
        record(MASKS[2], 5.0, [2.0, 3]),
        record(MASKS[0], math.nan, [6.0, 0, 0, 0, 6, 0, 6, 0]),
    ]
    outcomes = [4.0, 1.0, 0.0, math.nan]
    advantages, settings = ADVANTAGES[algorithm]
    if algorithm == "rloo":  # the KL is in the outcome
        group = [with_kl(each, i + 1.0) for i, each in enumerate(group)]
        settings = replace(settings, beta=0.5)
        outcomes = [outcome - 0.5 * (i + 1.0) for i, outcome in enumerate(outcomes)]
    got = advantages(replace(settings, turn_credit=credit, turn_discount=0.5), group).per_token
    expected = naive(credit, 0.5, [[1, 0, 2], [3, 0], [5], [6, 6, 6]], outcomes, leaves_one_out=algorithm == "rloo")
    for each, per_token, turns in zip(group, got, expected, strict=True):
        for (start, stop), value in zip(turn_ranges(each.completion.loss_mask), turns, strict=True):
            assert per_token[start:stop].tolist() == pytest.approx([value] * (stop - start), abs=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "changes", "expected"),
    [("grpo", {"scale_rewards": scale}, 0.5**0.5) for scale in ("group", "batch")]
    + [("rloo", {"normalize_advantages": True}, 2**0.5)],
)
def test_turns_of_completions_with_equal_rewards_are_divided_by_the_std_of_turns(algorithm, changes, expected):
    group = [record(MASKS[1], 1.0, [1.0, 0, 0]), record(MASKS[1], 1.0, [0.0, 0, 1])]
    advantages, settings = ADVANTAGES[algorithm]
    first, second = advantages(replace(settings, **changes, turn_credit="turn"), group).per_token
    assert first.tolist() == pytest.approx([expected, 0.0, -expected])
    assert second.tolist() == pytest.approx([-expected, 0.0, expected])


@pytest.mark.parametrize("kind", SEQUENCE_LOSSES)
def test_a_ratio_of_sequences_weighs_each_token_by_the_advantage_of_its_turn(kind):
    make, settings = SEQUENCE_LOSSES[kind]
    settings = replace(settings, turn_credit="turn")
    for seed in range(3):
        rows = ragged_rows((3, 1, 6, 2, 0, 4), seed)
        advantages = [torch.linspace(-1.0, 2.0, len(row.logprobs), dtype=torch.float64) for row in rows]
        loss, expected = 0.0, []
        for row, values in zip(rows, advantages, strict=True):
            log_ratios = row.logprobs.detach() - row.old
            ratio = (log_ratios.sum() if kind == "rloo" else log_ratios.sum() / max(1, len(values))).exp()
            # GRPO's sequence is the mean of its tokens, and its loss of this type weighs sequences by their length.
            weight = 1 / len(rows) if kind == "rloo" else 1 / sum(map(len, advantages))
            for value in values:
                bound = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
                is_clipped = ratio > bound if value > 0 else ratio < bound
                loss -= weight * value * (bound if is_clipped else ratio)
                expected.append(0.0 if is_clipped else -weight * value * ratio)
        got = trained_loss(make(settings), rows, advantages_T=torch.cat(advantages))
        torch.testing.assert_close(got, torch.as_tensor(loss), rtol=1e-12, atol=1e-12)
        slopes = torch.autograd.grad(got, [row.logprobs for row in rows], retain_graph=True)
        torch.testing.assert_close(
            torch.cat(slopes), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("kind", SEQUENCE_LOSSES)
def test_equal_advantages_of_turns_have_the_gradient_of_the_outcome(kind):
    make, settings = SEQUENCE_LOSSES[kind]
    rows = ragged_rows()
    of_turns = trained_loss(make(replace(settings, turn_credit="turn")), rows)
    torch.testing.assert_close(gradients(of_turns, rows), gradients(trained_loss(make(settings), rows), rows))

"""Advantages of GRPO and RLOO against numbers by hand; groups of one, equal rewards, missing rewards."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import GRPO, RLOO, record

from lowpeak.algorithms.groups import with_loss_masks
from lowpeak.algorithms.grpo import grpo_advantages
from lowpeak.algorithms.rloo import rloo_advantages

NAN = math.nan


def numbers(advantages):
    """Return one number per sequence; all of its tokens have the same, as float32."""
    for values in advantages.per_token:
        assert values.dtype == torch.float32
        assert (values == values[0]).all()
    return [values[0].item() for values in advantages.per_token]


def grpo(records, **changes):
    return numbers(grpo_advantages(replace(GRPO, **changes), records))


def rloo(records, **changes):
    return numbers(rloo_advantages(replace(RLOO, **changes), records))


def metric(advantages, name):
    return advantages.metrics[name].value()


def test_a_sequence_has_one_advantage_per_completion_token():
    records = [record(0, 1.0, length=3), record(0, 0.0, length=1)]
    assert [len(values) for values in grpo_advantages(GRPO, records).per_token] == [3, 1]
    assert [len(values) for values in rloo_advantages(RLOO, records).per_token] == [3, 1]


ONE = 1 / (2**0.5 + 1e-4)  # half the distance of two rewards over their std
GDPO = {"aggregation": "normalize_then_sum", "reward_weights": (1.0, 0.5)}


def by_rows(*rows):
    return [record(group, reward) for group, reward in rows]


@pytest.mark.parametrize(
    ("scale", "rows", "expected"),
    [
        # std of (1, 0, 0, 0) is 0.5, of (2, 4) is sqrt(2)
        (
            "group",
            [(0, 1.0), (0, 0.0), (0, 0.0), (0, 0.0), (1, 2.0), (1, 4.0)],
            [0.75 / 0.5001, *[-0.25 / 0.5001] * 3, -ONE, ONE],
        ),
        ("batch", [(0, 1.0), (0, 3.0), (1, 5.0), (1, 7.0)], [x / ((20 / 3) ** 0.5 + 1e-4) for x in (-1, 1, -1, 1)]),
        ("none", [(0, 1.0), (0, 4.0), (1, -2.0), (1, -2.5)], [-1.5, 1.5, 0.25, -0.25]),
        ("none", [(7, 1.0), (3, 5.0), (7, 4.0), (3, 6.0), (7, 1.0)], [-1.0, -0.5, 2.0, 0.5, -1.0]),
        ("none", [(0, 1.0), (0, NAN), (1, 0.0), (1, 2.0)], [0.0, 0.0, -1.0, 1.0]),
    ],
)
def test_grpo_scales_the_distance_to_the_mean_of_scattered_groups(scale, rows, expected):
    assert grpo(by_rows(*rows), scale_rewards=scale) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0, 1.0), (0, NAN), (0, 2.0), (0, 6.0)], [1 - 4, 0.0, 2 - 3.5, 6 - 1.5]),
        ([(0, 1.0), (0, NAN), (1, 0.0), (1, 2.0)], [0.0, 0.0, -2.0, 2.0]),
    ],
)
def test_rloos_baseline_is_the_mean_of_the_other_scored_sequences(rows, expected):
    assert rloo(by_rows(*rows)) == pytest.approx(expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    records = [record(0, 0.1) for _ in range(3)] + [record(1, 0.1 + 0.2), record(1, 0.3)] + [record(2, 0.0)]
    assert grpo(records, scale_rewards=scale) == [0.0] * 6
    assert rloo(records) == [0.0] * 6
    assert rloo(records, normalize_advantages=True) == [0.0] * 6


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_one_has_advantage_zero(scale):
    records = [record(0, 5.0), record(1, 0.0), record(1, 1.0)]
    first, *others = grpo(records, scale_rewards=scale)
    assert first == 0.0
    assert others[1] > 0 > others[0]
    assert rloo(records) == [0.0, -1.0, 1.0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_unscored_sequences_leave_the_statistics_and_get_zero(scale):
    scored = [record(0, 1.0), record(0, 3.0), record(1, 2.0), record(1, 7.0)]
    with_gaps = [scored[0], record(0, NAN), scored[1], *scored[2:], record(2, NAN), record(2, NAN)]
    a, b, c, d = grpo(scored, scale_rewards=scale)
    assert grpo(with_gaps, scale_rewards=scale) == [a, 0.0, b, c, d, 0.0, 0.0]


def test_gdpo_normalises_each_function_within_the_group_then_the_sum_over_the_batch():
    rewards = [(1.0, 10.0), (0.0, 30.0), (4.0, 2.0), (2.0, 2.0)]
    records = [record(i // 2, r, GDPO["reward_weights"]) for i, r in enumerate(rewards)]
    half, tens = (1 / 2) / (0.5**0.5 + 1e-4), 10 / (200**0.5 + 1e-4)
    sums = torch.tensor([half - 0.5 * tens, -half + 0.5 * tens, ONE, -ONE], dtype=torch.float64)
    assert grpo(records, **GDPO) == pytest.approx((sums / (sums.std() + 1e-4)).tolist(), rel=1e-6)


def test_gdpo_leaves_out_missing_rewards_and_unscored_sequences():
    records = [record(0, r, (1.0, 0.5)) for r in ((1.0, NAN), (0.0, NAN), (NAN, NAN), (NAN, 5.0))]
    a, b, c, d = grpo(records, **GDPO)
    assert (c, d) == (0.0, 0.0)  # the second function scored one sequence only
    z = 0.5 / (0.5**0.5 + 1e-4)
    std = torch.tensor([z, -z, 0.0], dtype=torch.float64).std().item()
    assert (a, b) == pytest.approx((z / (std + 1e-4), -z / (std + 1e-4)), rel=1e-6)


def test_gdpo_of_equal_rewards_is_exactly_zero():
    records = [record(0, (0.1, 0.3), (1.0, 0.5)) for _ in range(3)] + [record(1, (0.1, r), (1.0, 0.5)) for r in (0, 1)]
    *zeros, below, above = grpo(records, **GDPO)
    assert zeros == [0.0] * 3
    assert above > 0 > below


def test_rloo_normalises_by_the_std_of_advantages_over_the_batch():
    records = [record(0, 0.0), record(0, 1.0), record(1, 0.0), record(1, 3.0), record(1, NAN)]
    raw = torch.tensor([-1.0, 1.0, -3.0, 3.0], dtype=torch.float64)
    expected = [*(raw / (raw.std() + 1e-4)).tolist(), 0.0]
    assert rloo(records, normalize_advantages=True) == pytest.approx(expected, rel=1e-6)


def scored_record(reward, old, reference, mask=None, **kwargs):
    made = record(0, reward, length=len(old), **kwargs)
    completion = made.completion
    if mask is not None:
        completion = replace(completion, loss_mask=torch.tensor(mask))
    return replace(made, completion=completion, old=torch.tensor(old), reference=torch.tensor(reference))


@pytest.mark.parametrize(
    ("estimator", "kl"),
    [
        ("k1", 0.5 - 0.25),
        ("k2", 0.5**2 / 2 + 0.25**2 / 2),
        ("k3", math.exp(-0.5) + 0.5 - 1 + math.exp(0.25) - 0.25 - 1),
    ],
)
def test_rloo_subtracts_the_kl_of_loss_tokens_from_the_clipped_reward(estimator, kl):
    records = [
        scored_record(9.0, [-1.0, -1.0, NAN], [-1.5, -0.75, -9.0], mask=[True, True, False]),
        scored_record(0.0, [-1.0], [-1.0]),
    ]
    settings = replace(RLOO, beta=0.1, kl_estimator=estimator, reward_clip=(-1.0, 2.0))
    advantages = rloo_advantages(settings, records)
    difference = 2.0 - 0.1 * kl
    assert numbers(advantages) == pytest.approx([difference, -difference], rel=1e-6)
    assert metric(advantages, "kl") == pytest.approx(kl / 3)  # three loss tokens
    assert metric(advantages, "reward") == 4.5  # before clip and KL


def test_the_kl_of_a_masked_truncated_completion_does_not_count():
    records = [scored_record(1.0, [-1.0], [-2.0], finish_reason="length"), scored_record(0.0, [-1.0], [-1.0])]
    settings = replace(RLOO, beta=0.5)
    assert numbers(rloo_advantages(settings, records)) == pytest.approx([0.5, -0.5])
    masked = rloo_advantages(settings, with_loss_masks(records, mask_truncated=True))
    assert numbers(masked) == pytest.approx([1.0, -1.0])
    assert metric(masked, "kl") == 0.0


def test_reward_metrics_are_of_scored_sequences_and_count_those_of_equal_groups():
    rows = by_rows((0, 1.0), (0, 1.0), (1, 0.0), (1, 4.0), (1, NAN), (2, NAN))
    advantages = grpo_advantages(GRPO, rows)
    assert metric(advantages, "reward") == 1.5
    assert metric(advantages, "reward_std") == pytest.approx(torch.tensor([1.0, 1.0, 0.0, 4.0]).std().item())
    assert metric(advantages, "frac_reward_zero_std") == 3 / 6
    unscored = grpo_advantages(GRPO, rows[-2:])
    assert math.isnan(metric(unscored, "reward"))
    assert math.isnan(metric(unscored, "reward_std"))
    assert numbers(unscored) == [0.0, 0.0]


def test_masked_truncated_completions_count_in_grpos_statistics():
    records = [record(0, 0.0), record(0, 1.0, finish_reason="length")]
    assert grpo(with_loss_masks(records, mask_truncated=True)) == grpo(records) != [0.0, 0.0]


def test_tokens_outside_the_top_entropy_share_have_advantage_zero():
    settings = replace(GRPO, top_entropy_quantile=0.5)
    base = [record(0, 1.0, length=4), record(0, 0.0, length=4)]
    entropies = [torch.tensor([0.9, 0.1, 0.8, 0.2]), torch.tensor([0.3, 0.7, 0.05, 0.6])]
    rows = [replace(row, entropy=entropy) for row, entropy in zip(base, entropies, strict=True)]
    plain = grpo_advantages(GRPO, rows).per_token
    masked = grpo_advantages(settings, rows).per_token
    kept = [torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])]
    for row, advantages, mask in zip(masked, plain, kept, strict=True):
        torch.testing.assert_close(row, advantages * mask)

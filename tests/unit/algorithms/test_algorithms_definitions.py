"""Fields of each algorithm: needs, units, selection, weights of units; loss masks and KL estimators."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from algorithm_cases import GRPO, RLOO, SETTINGS, record

from lowpeak.algorithms.algorithm import StepCounts
from lowpeak.algorithms.groups import loss_mask, select_all, select_unequal
from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.loss_terms import kl_estimate
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.algorithms.supervised import make_supervised
from lowpeak.arguments.grpo import EntropyBonus, GRPOLossType

NAN = math.nan


@pytest.mark.parametrize(
    ("make", "settings", "changes", "needs"),
    [
        (make_grpo, GRPO, {"score_old": False}, set()),
        (make_grpo, GRPO, {}, {"old"}),
        (make_grpo, GRPO, {"score_old": False, "beta": 0.1}, {"reference"}),
        (make_grpo, GRPO, {"score_old": False, "top_entropy_quantile": 0.2}, {"entropy"}),
        (make_grpo, GRPO, {"beta": 0.1, "top_entropy_quantile": 0.2}, {"old", "reference", "entropy"}),
        (make_rloo, RLOO, {"score_old": False}, set()),
        (make_rloo, RLOO, {}, {"old"}),
        (make_rloo, RLOO, {"score_old": False, "beta": 0.1}, {"old", "reference"}),  # for a KL in the reward
    ],
)
def test_an_algorithm_needs_only_what_its_settings_use(make, settings, changes, needs):
    assert make(replace(settings, **changes)).needs == needs


@pytest.mark.parametrize(
    ("algorithm", "skips", "entropy_bonus", "unit"),
    [
        (make_grpo(GRPO), True, False, "token"),
        (make_grpo(replace(GRPO, importance_level="sequence")), True, False, "sequence"),
        (make_grpo(replace(GRPO, beta=0.1)), False, False, "token"),
        (make_grpo(replace(GRPO, entropy_bonus=EntropyBonus(0.1))), False, True, "token"),
        (make_grpo(replace(GRPO, top_entropy_quantile=0.2)), True, False, "token"),
        (make_rloo(replace(RLOO, beta=0.1)), True, False, "sequence"),
        (make_supervised(), False, False, "token"),
    ],
)
def test_settings_decide_units_and_whether_zero_advantages_are_skipped(algorithm, skips, entropy_bonus, unit):
    assert (algorithm.skip_zero_advantage, algorithm.entropy_bonus, algorithm.unit) == (skips, entropy_bonus, unit)


@pytest.mark.parametrize(("make", "settings"), [(make_grpo, GRPO), (make_rloo, RLOO)])
def test_groups_of_equal_rewards_are_dropped_only_if_set(make, settings):
    records = [record(0, 1.0), record(0, 1.0), record(1, 1.0), record(1, 0.0)]
    assert make(settings).select(records).indices == (0, 1, 2, 3)
    assert make(replace(settings, drop_equal_groups=True)).select(records).indices == (2, 3)


def test_supervised_training_selects_every_record_and_has_no_advantages():
    records = [record(0, 1.0, length=3), record(1, 0.0, length=1)]
    assert make_supervised().select(records).indices == (0, 1)
    assert [x.tolist() for x in make_supervised().advantages(records, {}).per_token] == [[0, 0, 0], [0]]


@pytest.mark.parametrize(
    ("rewards", "rows", "missing"),
    [
        (
            [(0, 1.0), (1, 1.0), (2, NAN), (3, 5.0), (0, 1.0), (1, 0.0), (2, NAN), (3, NAN), (4, 0.1 + 0.2), (4, 0.3)],
            (1, 5),
            4,
        ),
        ([(0, 1.0), (0, NAN), (0, 0.0)], (0, 1, 2), 0),  # an unscored sequence of a group with a difference
    ],
)
def test_dynamic_sampling_drops_and_counts_groups_without_a_difference(rewards, rows, missing):
    records = [record(group, reward) for group, reward in rewards]
    selection = select_unequal(records)
    assert (selection.indices, selection.num_dropped_groups) == (rows, missing)
    selection = select_all(records)
    assert (selection.indices, selection.num_dropped_groups) == (tuple(range(len(records))), 0)


@pytest.mark.parametrize(
    ("reason", "mask_truncated", "counted"),
    [
        ("length", True, [False, False, False]),
        ("length", False, [True, False, True]),
        ("stop", True, [True, False, True]),
    ],
)
def test_a_truncated_completion_has_no_loss_token_only_if_masked(reason, mask_truncated, counted):
    completion = record(0, 1.0, length=3, finish_reason=reason).completion
    completion.loss_mask[1] = False
    assert loss_mask(completion, mask_truncated).tolist() == counted
    assert completion.loss_mask.tolist() == [True, False, True]


COUNTS = StepCounts(num_sequences=8, num_tokens=100)
BY_HAND = [
    ("grpo", 1 / (4 * 8), 1 / 8),
    ("dr_grpo", 1 / (9 * 8), 4 / (9 * 8)),
    ("dapo", 1 / 100, 4 / 100),
    ("bnpo", 1 / 100, 4 / 100),
    ("sapo", 1 / (4 * 8), 1 / 8),
    ("luspo", 1 / 8, 4 / 8),
    ("cispo", 1 / 100, 4 / 100),
    ("vespo", 1 / 100, 4 / 100),
]


@pytest.mark.parametrize(("loss_type", "token", "sequence"), BY_HAND)
def test_a_sequence_of_four_tokens_has_the_weight_of_its_loss_type(loss_type, token, sequence):
    settings = replace(SETTINGS.get(loss_type, GRPO), loss_type=loss_type)
    assert make_grpo(settings).reduction(4, COUNTS) == pytest.approx(token)
    by_row = make_grpo(replace(settings, importance_level="sequence"))
    assert by_row.reduction(4, COUNTS) == pytest.approx(sequence)


def test_each_loss_type_has_its_weights_by_hand():
    assert {name for name, _, _ in BY_HAND} == {*get_args(GRPOLossType)}


@pytest.mark.parametrize(
    "algorithm",
    [
        make_grpo(replace(GRPO, loss_type=name, importance_level=level))
        for name, _, _ in BY_HAND
        for level in ("token", "sequence")
    ]
    + [make_rloo(RLOO), make_supervised()],
)
def test_a_sequence_without_loss_tokens_has_no_weight_even_in_an_empty_step(algorithm):
    assert algorithm.reduction(0, COUNTS) == 0.0
    assert algorithm.reduction(0, StepCounts(0, 0)) == 0.0
    if algorithm.name in ("rloo", "sft"):
        assert algorithm.reduction(4, COUNTS) == {"rloo": 1 / 8, "sft": 1 / 100}[algorithm.name]


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_kl_estimators_by_hand(estimator, expected):
    p, r = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_estimate(p, r, estimator).item() == pytest.approx(expected)
    assert kl_estimate(p, p, estimator).item() == 0.0


def test_k3_of_nearly_equal_logprobs_is_not_lost_to_rounding():
    p = torch.tensor([-1.0], dtype=torch.float32)
    r = p + 2.0**-10
    assert kl_estimate(p, r, "k3").item() == pytest.approx(2.0**-21, rel=2e-3)

"""What a unit weighs, and the estimators of KL: numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import CISPO, GRPO, RLOO

from lowpeak.algorithms.algorithm import StepCounts
from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.kl import kl_estimate
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.algorithms.supervised import make_supervised

COUNTS = StepCounts(num_rows=8, num_tokens=100)
BY_HAND = [
    ("grpo", 1 / (4 * 8), 1 / 8),
    ("dr_grpo", 1 / (9 * 8), 4 / (9 * 8)),
    ("dapo", 1 / 100, 4 / 100),
    ("bnpo", 1 / 100, 4 / 100),
    ("cispo", 1 / 100, 4 / 100),
]


@pytest.mark.parametrize(("loss_type", "token", "sequence"), BY_HAND)
def test_a_row_of_four_tokens_weighs_what_its_loss_type_says(loss_type, token, sequence):
    settings = replace(CISPO if loss_type == "cispo" else GRPO, loss_type=loss_type)
    assert make_grpo(settings).reduction(4, COUNTS) == pytest.approx(token)
    by_row = make_grpo(replace(settings, importance_level="sequence"))
    assert by_row.reduction(4, COUNTS) == pytest.approx(sequence)


@pytest.mark.parametrize(
    "algorithm",
    [
        make_grpo(replace(GRPO, loss_type=name, importance_level=level))
        for name, _, _ in BY_HAND[:4]
        for level in ("token", "sequence")
    ]
    + [make_rloo(RLOO), make_supervised()],
)
def test_a_row_without_counted_tokens_weighs_nothing_even_in_an_empty_step(algorithm):
    assert algorithm.reduction(0, COUNTS) == 0.0
    assert algorithm.reduction(0, StepCounts(0, 0)) == 0.0


def test_rloo_weighs_rows_alike_and_supervised_training_tokens():
    assert make_rloo(RLOO).reduction(4, COUNTS) == 1 / 8
    assert make_supervised().reduction(4, COUNTS) == 1 / 100


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_kl_estimators_by_hand(estimator, expected):
    p, r = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_estimate(p, r, estimator).item() == pytest.approx(expected)
    assert kl_estimate(p, p, estimator).item() == 0.0


def test_k1_and_k3_have_the_mean_of_the_kl_divergence():
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    kl = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference, estimator)).sum(), kl)


def test_k3_of_nearly_equal_log_probs_is_not_lost_to_rounding():
    p = torch.tensor([-1.0], dtype=torch.float32)
    r = p + 2.0**-10
    assert kl_estimate(p, r, "k3").item() == pytest.approx(2.0**-21, rel=2e-3)

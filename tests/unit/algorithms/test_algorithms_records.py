"""What each algorithm asks of a run: its unit, what is scored for it, what may be skipped."""

from __future__ import annotations

from dataclasses import replace

import pytest
from algorithm_cases import GRPO, RLOO, record

from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.algorithms.supervised import make_supervised
from lowpeak.config.grpo import EntropyBonus


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"score_old": False}, set()),
        ({}, {"old"}),
        ({"score_old": False, "beta": 0.1}, {"reference"}),
        ({"score_old": False, "top_entropy_quantile": 0.2}, {"entropy"}),
        ({"beta": 0.1, "top_entropy_quantile": 0.2}, {"old", "reference", "entropy"}),
    ],
)
def test_grpo_has_scored_only_what_its_settings_use(changes, needs):
    assert make_grpo(replace(GRPO, **changes)).needs == needs


@pytest.mark.parametrize(
    ("changes", "needs"),
    [({"score_old": False}, set()), ({}, {"old"}), ({"score_old": False, "beta": 0.1}, {"old", "reference"})],
)
def test_rloo_scores_old_and_reference_together_when_a_kl_goes_into_the_reward(changes, needs):
    assert make_rloo(replace(RLOO, **changes)).needs == needs


def test_rows_without_an_advantage_are_idle_unless_something_else_acts_on_them():
    assert make_grpo(GRPO).idle
    assert not make_grpo(replace(GRPO, beta=0.1)).idle
    assert not make_grpo(replace(GRPO, entropy_bonus=EntropyBonus(0.1))).idle
    assert make_rloo(replace(RLOO, beta=0.1)).idle
    assert not make_supervised().idle


def test_only_an_entropy_bonus_asks_for_the_gradient_of_entropy():
    assert make_grpo(replace(GRPO, entropy_bonus=EntropyBonus(0.1))).entropy_bonus
    assert not make_grpo(replace(GRPO, top_entropy_quantile=0.2)).entropy_bonus
    assert not make_rloo(RLOO).entropy_bonus


def test_the_unit_is_a_sequence_where_tokens_are_coupled():
    units = [a.unit for a in (make_grpo(GRPO), make_grpo(replace(GRPO, importance_level="sequence")), make_rloo(RLOO))]
    assert units == ["token", "sequence", "sequence"]


@pytest.mark.parametrize(("make", "settings"), [(make_grpo, GRPO), (make_rloo, RLOO)])
def test_equal_groups_are_dropped_only_when_asked(make, settings):
    records = [record(0, 1.0), record(0, 1.0), record(1, 1.0), record(1, 0.0)]
    assert make(settings).select(records).rows == (0, 1, 2, 3)
    assert make(replace(settings, drop_equal_groups=True)).select(records).rows == (2, 3)


def test_supervised_training_keeps_every_row_and_has_no_advantages():
    records = [record(0, 1.0, length=3), record(1, 0.0, length=1)]
    assert make_supervised().select(records).rows == (0, 1)
    assert [x.tolist() for x in make_supervised().advantages(records, {}).per_token] == [[0, 0, 0], [0]]

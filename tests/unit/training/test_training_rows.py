"""Which of a rollout's rows each step trains on."""

from __future__ import annotations

import pytest
import torch

from lowpeak.arguments.rollout import RolloutSettings
from lowpeak.records import Completion, Record
from lowpeak.training.rollout import Rollout, records_of_step

WRITTEN = Completion(torch.tensor([2]), torch.zeros(1), torch.ones(1, dtype=torch.bool), "stop")
SETTINGS = RolloutSettings(num_prompts=6, num_generations=2, rows_per_step=4, steps_per_pass=3, num_iterations=2)


def rollout(number: int, num_groups: int = 6) -> Rollout:
    rows = [Record(row // 2, (1,), WRITTEN, (), 0.0) for row in range(2 * num_groups)]
    return Rollout(number, tuple(rows))


def cuts(made: Rollout, seed: int = 0, unit="token"):
    return [records_of_step(made, SETTINGS, seed, step, unit) for step in range(SETTINGS.num_steps)]


def test_each_pass_takes_all_rows_once_by_whole_groups_in_the_same_cuts():
    first, second, third, *again = cuts(rollout(0))
    assert again == [first, second, third]
    assert sorted(first + second + third) == list(range(12))
    assert all(rows[i] // 2 == rows[i + 1] // 2 for rows in (first, second, third) for i in (0, 2))


def test_rollouts_and_seeds_are_shuffled_differently():
    orders = {tuple(cuts(rollout(number), seed)) for number in range(3) for seed in range(3)}
    assert len(orders) == 9


@pytest.mark.parametrize(("unit", "sizes"), [("token", [3, 3, 4]), ("pair", [2, 4, 4])])
def test_a_short_rollout_is_cut_evenly_and_never_within_a_pair(unit, sizes):
    found = cuts(rollout(0, num_groups=5), unit=unit)[:3]
    assert [len(rows) for rows in found] == sizes
    assert sorted(sum(found, ())) == list(range(10))

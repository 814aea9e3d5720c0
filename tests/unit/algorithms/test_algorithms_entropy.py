"""The top-entropy mask against torch.quantile, and the entropy coefficient step by step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import GRPO

from lowpeak.algorithms.grpo import make_grpo, top_entropy_masks
from lowpeak.arguments.grpo import EntropyBonus


@pytest.mark.parametrize("quantile", [0.0, 0.05, 0.2, 0.5, 0.7, 0.8, 1.0])
@pytest.mark.parametrize("lengths", [(5, 0, 11, 1), (1,), (11,), (2, 4)])
def test_the_masks_are_those_of_one_interpolated_quantile_over_all_sequences(lengths, quantile):
    generator = torch.Generator().manual_seed(0)
    entropies = [torch.rand(n, generator=generator) for n in lengths]
    masks = top_entropy_masks(entropies, quantile)
    threshold = torch.quantile(torch.cat(entropies).double(), 1 - quantile)
    expected = [(entropy.double() >= threshold - 1e-12).float() for entropy in entropies]
    assert [mask.tolist() for mask in masks] == [mask.tolist() for mask in expected]


@pytest.mark.parametrize(
    ("entropies", "quantile", "expected"),
    [
        ([[0.9, 0.1, 0.2, 0.3], [0.4, 0.5, 0.0, 0.6, 0.7, 0.8]], 0.2, [[1, 0, 0, 0], [0, 0, 0, 0, 0, 1]]),
        ([[0.0, 1.0, 1.0, 1.0]], 0.5, [[0, 1, 1, 1]]),  # at the threshold
        ([[0.1, 0.5, 0.5 + 3e-7, 0.5 - 3e-7, 0.9, 0.2]], 0.5, [[0, 1, 1, 1, 1, 0]]),  # and off it by rounding
        ([], 0.2, []),
        ([[]], 0.2, [[]]),
    ],
)
def test_tokens_of_the_highest_entropies_are_in(entropies, quantile, expected):
    masks = top_entropy_masks([torch.tensor(row) for row in entropies], quantile)
    assert [mask.tolist() for mask in masks] == expected


def test_a_fixed_coefficient_never_moves():
    algorithm = make_grpo(replace(GRPO, entropy_bonus=EntropyBonus(0.1)))
    state = algorithm.update(algorithm.state, {"entropy": 0.0})
    assert algorithm.coefficients() == algorithm.coefficients(state, step=7) == {"entropy_coef": 0.1}
    resumed = algorithm.coefficients({"entropy_coef": 0.3}, step=7)  # of a checkpoint that was trained with another
    assert resumed == {"entropy_coef": 0.1}


def test_an_adaptive_coefficient_acts_at_or_below_the_target_only():
    bonus = EntropyBonus(0.5, target=1.0, delta=0.2, minimum=0.1, maximum=0.8)
    algorithm = make_grpo(replace(GRPO, entropy_bonus=bonus))
    state, applied, control = algorithm.state, [], []
    assert state["entropy_coef"] == 0.0  # no entropy is known before the first step
    for entropy in (1.0, 0.9, 1.1, 1.1, 1.1, 1.1, 0.2, math.nan):
        state = algorithm.update(state, {"entropy": entropy})
        applied.append(state["entropy_coef"])
        control.append(state["entropy_control"])
    assert control == pytest.approx([0.7, 0.8, 0.6, 0.4, 0.2, 0.1, 0.3, 0.3])
    assert applied == pytest.approx([0.7, 0.8, 0.0, 0.0, 0.0, 0.0, 0.3, 0.3])


def test_a_step_without_an_entropy_leaves_the_state_and_without_a_bonus_there_is_none():
    algorithm = make_grpo(replace(GRPO, entropy_bonus=EntropyBonus(0.5, target=1.0, delta=0.2)))
    assert algorithm.update(algorithm.state, {"loss": 1.0}) == algorithm.state
    plain = make_grpo(GRPO)
    assert plain.coefficients() == plain.update({}, {"entropy": 0.1}) == {}

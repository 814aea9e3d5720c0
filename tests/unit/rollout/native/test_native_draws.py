"""Uniforms made ahead are those of each position asked for alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from lowpeak.config.rollout import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.draws import Draws
from lowpeak.rollout.native.waves import Row
from lowpeak.rollout.sampling import uniforms

SAMPLING = Sampling(num_generations=2, max_new_tokens=150, seed=4, rollout=6)
PROMPTS = [Prompt(serial, (1,), "") for serial in (30, 20)]
WAVE = [Row(1, 0), Row(1, 1), Row(0, 0), Row(0, 1)]


def test_each_position_has_its_own_uniforms():
    draws = Draws(WAVE, PROMPTS, SAMPLING, torch.device("cpu"))
    expected = uniforms(SAMPLING, torch.tensor([20, 20, 30, 30]), torch.tensor([0, 1, 0, 1]), torch.arange(150))
    for position in range(150):
        assert torch.equal(draws.at(position), expected[:, position])


def test_rows_that_began_at_unlike_times_have_the_uniforms_of_their_own_positions():
    starts = [0, 5, 77, 3]
    draws = Draws(WAVE, PROMPTS, SAMPLING, torch.device("cpu"), starts)
    expected = uniforms(SAMPLING, torch.tensor([20, 20, 30, 30]), torch.tensor([0, 1, 0, 1]), torch.arange(150))
    for step in range(70):
        assert torch.equal(draws.at(step), expected[range(4), [start + step for start in starts]])


def test_greedy_needs_no_uniforms():
    assert Draws(WAVE, PROMPTS, replace(SAMPLING, temperature=0.0), torch.device("cpu")).at(0) is None

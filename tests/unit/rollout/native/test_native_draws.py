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


def test_each_position_has_its_own_uniforms_also_after_rows_have_left():
    draws = Draws(WAVE, PROMPTS, SAMPLING, torch.device("cpu"))
    expected = uniforms(SAMPLING, torch.tensor([20, 20, 30, 30]), torch.tensor([0, 1, 0, 1]), torch.arange(150))
    kept = torch.arange(4)
    for position in range(150):
        if position in (70, 140):
            draws.keep(torch.tensor([0, 2]) if position == 70 else torch.tensor([1]))
            kept = torch.tensor([0, 2]) if position == 70 else torch.tensor([2])
        assert torch.equal(draws.at(position), expected[kept, position])


def test_greedy_needs_no_uniforms():
    assert Draws(WAVE, PROMPTS, replace(SAMPLING, temperature=0.0), torch.device("cpu")).at(0) is None

"""Uniforms made ahead are those of each position asked for alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowpeak.config.rollout import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native import draws as module
from lowpeak.rollout.native.draws import Draws
from lowpeak.rollout.native.slots import Row
from lowpeak.rollout.sampling import uniforms

SAMPLING = Sampling(num_generations=2, max_new_tokens=150, seed=4, rollout=6)
PROMPTS = [Prompt(serial, (1,), "") for serial in (30, 20)]
WAVE = [Row(1, 0), Row(1, 1), Row(0, 0), Row(0, 1)]
NUMBERS = [2, 3, 0, 1]


@pytest.mark.parametrize("num_generations", [2, module._MAX_DRAWS // 100])
def test_rows_have_the_uniforms_of_their_own_positions(num_generations):
    many = [Row(0, i) for i in range(num_generations)]
    draws = Draws(num_generations, SAMPLING, torch.device("cpu"))
    draws.make(range(num_generations), many, PROMPTS)
    serials, completions = torch.full((num_generations,), 30), torch.arange(num_generations)
    expected = uniforms(SAMPLING, serials, completions, torch.arange(150))
    positions = completions % 150
    assert torch.equal(draws.at(completions, positions), expected[completions, positions])


def test_groups_that_begin_at_unlike_times_keep_their_own_draws():
    draws = Draws(4, SAMPLING, torch.device("cpu"))
    draws.make(NUMBERS[:2], WAVE[:2], PROMPTS)
    draws.make(NUMBERS[2:], WAVE[2:], PROMPTS)
    expected = uniforms(SAMPLING, torch.tensor([20, 20, 30, 30]), torch.tensor([0, 1, 0, 1]), torch.arange(150))
    positions = torch.tensor([0, 5, 77, 149])
    assert torch.equal(draws.at(torch.tensor(NUMBERS), positions), expected[torch.arange(4), positions])


def test_greedy_needs_no_uniforms():
    draws = Draws(4, replace(SAMPLING, temperature=0.0), torch.device("cpu"))
    draws.make(NUMBERS, WAVE, PROMPTS)
    assert draws.at(torch.tensor(NUMBERS), torch.zeros(4, dtype=torch.int64)) is None

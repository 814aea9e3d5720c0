"""States of random generators are restored to the same draws."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lowpeak.checkpoint import capture_rng_state, preserve_rng_state, restore_rng_state


def draw():
    """Numbers of all three generators, normal ones too: those come in pairs, of which one is kept."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.randn(3).tolist()]


@pytest.mark.parametrize("before", [0, 1])
def test_restored_generators_draw_the_same_numbers_after_an_evaluation(before):
    def evaluate():
        draw()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        raise ZeroDivisionError

    for _ in range(before):
        random.gauss(0, 1)
        np.random.randn()
    state = capture_rng_state()
    first = draw()
    assert draw() != first
    for _ in range(2):
        restore_rng_state(state)
        with pytest.raises(ZeroDivisionError), preserve_rng_state():
            evaluate()
        assert draw() == first


def test_a_changed_number_of_cuda_devices_is_logged(caplog):
    number = torch.cuda.device_count()
    state = capture_rng_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * (number + 1)}
    if number:
        state["cuda"][:number] = torch.cuda.get_rng_state_all()
    restore_rng_state(state)
    assert [record.args for record in caplog.records] == [(number + 1, number)]

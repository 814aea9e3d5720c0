"""PPO learns: held-out accuracy of noisy sort rises from the wrong start, by a function."""

from __future__ import annotations

import pytest
from benchmarks.harness.task import noisy_sort

from lowpeak import PPOConfig, PPOTrainer

pytestmark = pytest.mark.release


def test_held_out_accuracy_rises(learn):
    def make(model, shared, **more):
        own = {"num_iterations": 2, "vf_coef": 0.5, "cliprange_value": None, "value_learning_rate": 1e-2}
        args = PPOConfig(**shared, **own, learning_rate=5e-4, beta=0.0)
        return PPOTrainer(model, noisy_sort.sorted_exactly, args, **more)

    learn(make, steps=50)

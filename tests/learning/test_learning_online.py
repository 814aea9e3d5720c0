"""PPO and Online DPO learn: held-out accuracy of noisy sort rises from the wrong start, by a function and by a judge."""

from __future__ import annotations

import pytest
from benchmarks.harness.task import load_example, noisy_sort

from lowpeak import OnlineDPOConfig, OnlineDPOTrainer, PPOConfig, PPOTrainer

pytestmark = pytest.mark.release


def test_held_out_accuracy_rises_by_ppo(learn):
    def make(model, shared, **more):
        own = {"num_iterations": 2, "vf_coef": 0.5, "cliprange_value": None, "value_learning_rate": 1e-2}
        args = PPOConfig(**shared, **own, learning_rate=5e-4, beta=0.0)
        return PPOTrainer(model, noisy_sort.sorted_exactly, args, **more)

    learn(make, steps=50)


@pytest.mark.parametrize("by", ["reward", "judge"])
def test_held_out_accuracy_rises_by_online_dpo(learn, by):
    def make(model, shared, **more):
        judge = load_example("noisy_sort_judge").judge
        by_what = {"reward_funcs": noisy_sort.sorted_exactly} if by == "reward" else {"judge": judge}
        return OnlineDPOTrainer(model, args=OnlineDPOConfig(**shared, learning_rate=5e-4, beta=0.1), **by_what, **more)

    learn(make, steps=75)

"""Online DPO learns: held-out accuracy of noisy sort rises from the wrong start, by a reward and by a judge."""

from __future__ import annotations

import pytest
from benchmarks.harness.task import load_example, noisy_sort

from lowpeak import OnlineDPOConfig, OnlineDPOTrainer

pytestmark = pytest.mark.release


@pytest.mark.parametrize("by", ["reward", "judge"])
def test_held_out_accuracy_rises(learn, by):
    def make(model, shared, **more):
        judge = load_example("noisy_sort_judge").judge
        by_what = {"reward_funcs": noisy_sort.sorted_exactly} if by == "reward" else {"judge": judge}
        return OnlineDPOTrainer(model, args=OnlineDPOConfig(**shared, learning_rate=5e-4, beta=0.1), **by_what, **more)

    learn(make, steps=75)

"""DPO and KTO learn from pairs alone: held-out accuracy of noisy sort rises from the wrong start."""

from __future__ import annotations

import pytest
from benchmarks.harness.task import noisy_sort

from lowpeak import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

pytestmark = pytest.mark.release
OF_GENERATION = ("num_generations", "max_completion_length")


@pytest.mark.parametrize(
    ("config", "trainer", "own", "steps"),
    [
        (DPOConfig, DPOTrainer, {"per_device_train_batch_size": 64, "loss_type": ["sigmoid", "sft"]}, 50),
        (KTOConfig, KTOTrainer, {"per_device_train_batch_size": 128}, 75),
    ],
    ids=["dpo", "kto"],
)
def test_held_out_accuracy_rises(learn, config, trainer, own, steps):
    def make(model, shared, train_dataset, **more):
        settings = {name: value for name, value in shared.items() if name not in OF_GENERATION}
        args = config(**settings | own, learning_rate=1e-3, beta=0.5)
        return trainer(model, args=args, train_dataset=noisy_sort.make_preferences(steps * 64, 0), **more)

    learn(make, steps)

"""PPO learns by a trained reward model: held-out accuracy of noisy sort rises from the wrong start."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.harness.task import train_judge

from lowpeak import PPOConfig, PPOTrainer

pytestmark = [
    pytest.mark.release,
    pytest.mark.timeout(1800),
]  # training the reward model takes minutes on a slow processor
TASK = (6, 32)
JUDGE_STEPS = 700
# A reward model can be fooled, so the policy is held to its start, and the critic begins as the reward model and learns first.
OWN = {
    "num_iterations": 2,
    "vf_coef": 0.5,
    "cliprange_value": None,
    "learning_rate": 3e-4,
    "value_learning_rate": 5e-4,
    "beta": 0.2,
    "critic": "model",
    "value_warmup_steps": 10,
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory, start) -> str:
    """A reward model of the task, trained on preferences from the same start."""
    folder: Path = tmp_path_factory.mktemp("judge")
    train_judge(start, folder, 0, JUDGE_STEPS)
    return str(folder)


def test_held_out_accuracy_rises(learn, judge):
    learn(
        lambda model, shared, **more: PPOTrainer(
            model, judge, PPOConfig(**shared, **OWN, value_model_path=judge), **more
        ),
        160,
    )

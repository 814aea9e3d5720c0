"""PPO learns: held-out accuracy of noisy sort rises from the wrong start, by a function and by a trained reward model."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.harness.task import noisy_sort, train_judge

from lowpeak import PPOConfig, PPOTrainer

JUDGE_STEPS, JUDGE_ROWS = 400, 32
FUNCTION = {"learning_rate": 5e-4, "value_learning_rate": 1e-2, "beta": 0.0}
# A reward model can be fooled, so the policy is held to its start, and the critic begins as the reward model and learns first.
MODEL = {
    "learning_rate": 5e-4,
    "value_learning_rate": 5e-4,
    "beta": 0.1,
    "critic": "model",
    "value_warmup_steps": 10,
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory, start) -> str:
    """A reward model of the task, trained on preferences from the same start."""
    folder: Path = tmp_path_factory.mktemp("judge")
    train_judge(start, folder, 0, JUDGE_STEPS, JUDGE_ROWS)
    return str(folder)


def trainer_by(reward, own):
    def make(model, shared, **more):
        args = PPOConfig(**shared, num_iterations=2, vf_coef=0.5, cliprange_value=None, **own)
        return PPOTrainer(model, reward, args, **more)

    return make


def test_held_out_accuracy_rises_by_a_function(learn):
    learn(trainer_by(noisy_sort.sorted_exactly, FUNCTION), steps=50)


def test_held_out_accuracy_rises_by_a_reward_model(learn, judge):
    learn(trainer_by(judge, {**MODEL, "value_model_path": judge}), steps=60)

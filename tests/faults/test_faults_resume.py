"""Exact resume: a run that was killed and resumed ends with the bits and the journal of the run left alone."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from fault_kills import KILLS, kill_in_backward, killing_reward
from fault_processes import KILLED, call, succeed
from fault_runs import Case, build, finish, ones, rollouts, short, steps

SHARED = {"num_iterations": 2, "beta": 0.04, "save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 5}
KILLED_RUN = Case(args=SHARED, dropout=0.1)

CASES = {
    "on-policy, each step saved": Case(args={"save_steps": 1, "save_total_limit": 2}),
    "several steps of one rollout, twice": Case(
        args={"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "save_total_limit": 2},
        num_rows=20,
        dropout=0.1,
    ),
    "a reference that moves, dynamic sampling, adaptive entropy": Case(
        args={
            "steps_per_generation": 2,
            "beta": 0.04,
            "sync_ref_model": True,
            "ref_model_sync_steps": 2,
            "dynamic_sampling_rounds": 2,
            "use_adaptive_entropy": True,
            "entropy_target": 2.2,
            "num_generations": 2,
        },
        dropout=0.1,
    ),
    "epochs, each saved at its end": Case(args={"max_steps": -1, "num_train_epochs": 3, "save_strategy": "epoch"}, num_rows=4),
    "epochs, saved within": Case(args={"max_steps": -1, "num_train_epochs": 3, "num_iterations": 2}, num_rows=5),
    "a stream through a shuffle buffer": Case(stream=True, num_rows=9),
    "sequence ratios and uncertain tokens": Case(
        args={"importance_sampling_level": "sequence", "num_iterations": 2, "top_entropy_quantile": 0.5}
    ),
    "the best model kept and loaded at the end": Case(
        args={
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_steps": 1,
            "save_total_limit": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "reward",
        }
    ),
    "a rollout function": Case(args={"num_iterations": 4}, rollout_func=True),
    "an adapter": Case(args={"num_iterations": 2, "beta": 0.04}, adapter="fresh", dropout=0.1),
    "an adapter that came in trained": Case(args={"num_iterations": 2, "beta": 0.04}, adapter="trained"),
    "RLOO": Case("rloo", {"num_iterations": 2, "reward_clip_range": (-1.0, 2.0)}, dropout=0.1),
    "supervised": Case("sft", {"max_steps": -1, "num_train_epochs": 3, "eval_strategy": "steps", "eval_steps": 2}, dropout=0.1),
}


def run_alone(case: Case, folder: Path, result: Path) -> None:
    trainer = build(case, folder)
    trainer.train()
    finish(trainer, result)


def run_killed(case: Case, folder: Path, moment: str) -> None:
    trainer = build(case, folder)
    KILLS[moment](trainer)
    trainer.train()


def run_killed_in_a_reward(case: Case, folder: Path, step: int) -> None:
    judge = killing_reward(step)
    judge.__name__ = ones.__name__
    build(case, folder, [judge, short]).train()


def run_killed_in_training(case: Case, folder: Path, step: int) -> None:
    trainer = build(case, folder)
    kill_in_backward(trainer, step)
    trainer.train()


def run_resumed(case: Case, folder: Path, result: Path) -> None:
    trainer = build(case, folder)
    trainer.train(resume_from_checkpoint=True)
    finish(trainer, result)


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    """What a case's run comes to when nobody kills it: (result, journal's steps, journal's rollouts)."""

    @functools.cache
    def outcome(name: str) -> tuple[Any, ...]:
        folder = tmp_path_factory.mktemp("alone")
        case = CASES.get(name, KILLED_RUN)
        succeed(run_alone, case, folder / "run", folder / "result.json", log=folder / "log")
        return ending(folder)

    return outcome


def ending(folder: Path) -> tuple[Any, ...]:
    result = json.loads((folder / "result.json").read_text())
    return result, steps(folder / "run"), rollouts(folder / "run")


def resume(case: Case, folder: Path) -> tuple[Any, ...]:
    succeed(run_resumed, case, folder / "run", folder / "result.json", log=folder / "log")
    return ending(folder)


@pytest.mark.parametrize("moment", KILLS)
def test_a_run_killed_at_any_moment_and_resumed_ends_as_if_left_alone(tmp_path, left_alone, moment):
    assert call(run_killed, KILLED_RUN, tmp_path / "run", moment, log=tmp_path / "log") == KILLED
    assert resume(KILLED_RUN, tmp_path) == left_alone("killed")


def test_a_run_killed_inside_a_reward_draws_the_same_noise_again(tmp_path, left_alone):
    assert call(run_killed_in_a_reward, KILLED_RUN, tmp_path / "run", 4, log=tmp_path / "log") == KILLED
    assert resume(KILLED_RUN, tmp_path) == left_alone("killed")


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_of_any_kind_ends_as_if_left_alone(tmp_path, left_alone, name):
    assert call(run_killed_in_training, CASES[name], tmp_path / "run", 4, log=tmp_path / "log") == KILLED
    assert resume(CASES[name], tmp_path) == left_alone(name)

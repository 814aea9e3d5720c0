"""Exact resume: a run that was killed and resumed ends with the bits and the journal of the run left alone."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import random_kills
from fault_kills import KILLS, kill_at_event, renaming, run_killed_in_training
from fault_runs import STANDARD, Case, build, checkpoints, ending, finish, run_alone, run_resumed

from case_selection import mark_extended
from child_processes import KILLED, call, succeed
from file_damage import sign_again
from lowpeak.errors import CheckpointError

MOVING = {
    "steps_per_generation": 2,
    "num_generations": 2,
    "beta": 0.04,
    "sync_ref_model": True,
    "ref_model_sync_steps": 2,
}
EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
CASES = {
    "several steps of one rollout, twice": Case(
        args={"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "save_total_limit": 2},
        num_rows=20,
        dropout=0.1,
    ),
    "a reference that moves, dynamic sampling, adaptive entropy": Case(
        args={**MOVING, "dynamic_sampling_rounds": 2, "use_adaptive_entropy": True, "entropy_target": 2.2}, dropout=0.1
    ),
    "epochs, each saved at its end": Case(
        args={"max_steps": -1, "num_train_epochs": 3, "save_strategy": "epoch"}, num_rows=4
    ),
    "epochs, saved within": Case(args={"max_steps": -1, "num_train_epochs": 3, "num_iterations": 2}, num_rows=5),
    "a stream through a shuffle buffer": Case(stream=True, num_rows=9),
    "the best model kept and loaded at the end": Case(
        args={**EACH_STEP, "save_total_limit": 1, "load_best_model_at_end": True, "metric_for_best_model": "reward"}
    ),
    "a rollout function": Case(args={"num_iterations": 4}, rollout_func=True),
    "an adapter": Case(args={"num_iterations": 2, "beta": 0.04}, adapter="fresh", dropout=0.1),
    "an adapter that came in trained": Case(args={"num_iterations": 2, "beta": 0.04}, adapter="trained"),
    "bf16 weights of 32 bits, a reference that moves": Case(args={**MOVING, "weight_bits": 32}, dropout=0.1),
    "bf16 weights of 24 bits, fp32 sums": Case(args={"num_iterations": 2, "weight_bits": 24, "gradient_bits": 32}),
    "an average of the policy that teaches it": Case(
        "distillation", {"teacher_model_kind": "ema", "num_iterations": 2, "lmbda": 0.5, "num_generations": 1}
    ),
    "supervised": Case(
        "sft", {"max_steps": -1, "num_train_epochs": 3, "eval_strategy": "steps", "eval_steps": 2}, dropout=0.1
    ),
}


CORE = (
    *("several steps of one rollout, twice", "a reference that moves, dynamic sampling, adaptive entropy"),
    *("epochs, saved within", "a stream through a shuffle buffer", "an adapter", "supervised"),
    "bf16 weights of 24 bits, fp32 sums",
)
CORE_KILLS = ("rollout", "reward", "score", "backward", "optimizer", "evaluation", "journal of a step")
CORE_KILLS += ("save, in the middle", "removal, in the middle")


def run_killed(case: Case, place: Path, moment: str) -> None:
    trainer = build(case, place / "run")
    KILLS[moment](trainer)
    trainer.train()


def run_killed_while_it_resumes(case: Case, place: Path, target: str) -> None:
    trainer = build(case, place / "run")
    kill_at_event(renaming(".new", target))
    trainer.train(resume_from_checkpoint=True)


def resume(case: Case, place: Path) -> tuple[Any, ...]:
    succeed(run_resumed, case, place)
    return ending(place)


@pytest.mark.parametrize("moment", mark_extended(list(KILLS), CORE_KILLS))
def test_a_run_killed_at_any_moment_and_resumed_ends_as_if_left_alone(tmp_path, left_alone, moment):
    assert call(run_killed, STANDARD, tmp_path, moment) == KILLED
    assert resume(STANDARD, tmp_path) == left_alone(STANDARD)


@pytest.mark.parametrize("name", mark_extended(list(CASES), CORE))
def test_a_killed_run_of_any_kind_ends_as_if_left_alone(tmp_path, left_alone, name):
    assert call(run_killed_in_training, CASES[name], tmp_path, 4) == KILLED
    assert resume(CASES[name], tmp_path) == left_alone(CASES[name])


@pytest.mark.parametrize("target", mark_extended(["steps.jsonl", "rollouts.jsonl"], ["steps.jsonl"]))
def test_a_run_killed_again_while_it_resumes_ends_as_if_left_alone(tmp_path, left_alone, target):
    assert call(run_killed_in_training, STANDARD, tmp_path, 5) == KILLED
    assert call(run_killed_while_it_resumes, STANDARD, tmp_path, target) == KILLED
    assert resume(STANDARD, tmp_path) == left_alone(STANDARD)


@pytest.mark.extended
def test_a_command_killed_by_each_signal_and_started_again_ends_as_if_left_alone(tmp_path, monkeypatch):
    """The short form of what `make test-release` does 20 times to the quickstart's whole run."""
    sort = random_kills.quickstart.TINY_TASKS["sort"]
    shorter = replace(sort, warm={**sort.warm, "max_steps": 1})
    monkeypatch.setitem(random_kills.quickstart.TINY_TASKS, "sort", shorter)
    monkeypatch.setitem(random_kills.KINDS, "quickstart", replace(random_kills.KINDS["quickstart"], latest=0.6))
    (tmp_path / "quickstart").mkdir()
    random_kills.prepare_quickstart(tmp_path / "quickstart", steps=12)
    random_kills.try_kind("quickstart", 3, random.Random(0), tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["tools", "draws"])
def test_a_run_killed_within_calls_loses_no_conversation_and_no_result_is_computed_twice(tmp_path, kind):
    """The short form of 100 such kills in `make test-release`."""
    random_kills.try_kind(kind, 4, random.Random(0), tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["talk", "programs"])
def test_a_run_whose_conversations_are_ahead_ends_as_if_left_alone_after_kills(tmp_path, kind):
    """The short form of the kinds `talk`, `talk2` and `programs` in `make test-release`."""
    random_kills.try_kind(kind, 3, random.Random(0), tmp_path)


def test_a_run_killed_before_its_first_checkpoint_says_so_and_can_be_started_again(tmp_path, left_alone):
    assert call(run_killed_in_training, STANDARD, tmp_path, 1) == KILLED
    with pytest.raises(CheckpointError, match="checkpoint-N"):
        build(STANDARD, tmp_path / "run").train(resume_from_checkpoint=True)
    succeed(run_alone, STANDARD, tmp_path)
    assert ending(tmp_path) == left_alone(STANDARD)
    assert (tmp_path / "run/earlier-1/journal/steps.jsonl").exists()


@pytest.mark.extended
@pytest.mark.parametrize("name", ["max_steps in the middle of an epoch", "epochs"])
def test_resuming_a_finished_run_changes_nothing(tmp_path, name):
    case = {"epochs": CASES["epochs, saved within"]}.get(name, STANDARD)
    succeed(run_alone, case, tmp_path)
    before = ending(tmp_path)
    assert resume(case, tmp_path) == before


def run_from(case: Case, place: Path, name: str, dies: bool) -> None:
    trainer = build(case, place / "run")
    if dies:
        kill_at_event(renaming(".new", "steps.jsonl"))
    trainer.train(resume_from_checkpoint=str(place / "run" / name))
    finish(trainer, place / "result.json")


@pytest.mark.parametrize("dies", mark_extended([False, True], [False]))
def test_a_run_that_goes_back_to_an_older_checkpoint_comes_to_the_same_later_ones(tmp_path, dies):
    case = Case(args={"num_iterations": 2}, dropout=0.1)
    succeed(run_alone, case, tmp_path)
    before = ending(tmp_path)
    assert call(run_from, case, tmp_path, "checkpoint-3", dies) == (KILLED if dies else 0)
    if dies:
        succeed(run_resumed, case, tmp_path)
    assert ending(tmp_path) == before
    if not dies:
        assert checkpoints(tmp_path / "run") == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]
        assert checkpoints(tmp_path / "run/earlier-1") == ["checkpoint-6", "checkpoint-8"]


def test_a_new_run_beside_old_checkpoints_keeps_its_own_and_warns(tmp_path, left_alone):
    old = tmp_path / "run/checkpoint-100"
    old.mkdir(parents=True)
    succeed(run_alone, STANDARD, tmp_path)
    assert ending(tmp_path) == left_alone(STANDARD)
    assert checkpoints(tmp_path / "run") == ["checkpoint-8"]
    assert checkpoints(tmp_path / "run/earlier-1") == ["checkpoint-100"]
    assert str(tmp_path / "run/earlier-1") in (tmp_path / "log").read_text()


def test_the_journal_has_the_columns_that_readers_rely_on(left_alone):
    _, steps, rows = left_alone(STANDARD)
    assert all({"loss", "grad_norm", "entropy"} <= row.keys() for row in steps)
    names = "format rollout group prompt completion policy_version num_tokens finish_reason rewards reward advantage"
    assert [*rows[0]] == ["step", *names.split()]
    summed = [row["rewards"]["ones"] + (row["rewards"]["short"] or 0) for row in rows]
    assert [row["reward"] for row in rows] == pytest.approx(summed)


def note_sizes(case: Case, place: Path) -> None:
    trainer = build(case, place / "run")
    trainer.train(resume_from_checkpoint=True)
    budget = trainer.run.budget
    (place / "sizes.json").write_text(json.dumps([budget.max_tokens, trainer.run.logprob_settings.chunk_size]))


def test_a_resumed_run_keeps_the_sizes_that_auto_became_and_takes_those_that_are_asked_for(tmp_path):
    case = Case(args={"max_steps": 4})
    succeed(run_alone, case, tmp_path)
    state_file = tmp_path / "run/checkpoint-4/lowpeak_state.json"
    state = json.loads(state_file.read_text())
    state["resolved"] |= {"micro_batch_tokens": 77, "logprob_chunk_size": 5}
    state_file.write_text(json.dumps(state))
    sign_again(state_file.parent)
    succeed(note_sizes, case, tmp_path)
    assert json.loads((tmp_path / "sizes.json").read_text()) == [77, 5]
    succeed(note_sizes, Case(args={"max_steps": 4, "logprob_chunk_size": 3}), tmp_path)
    assert json.loads((tmp_path / "sizes.json").read_text()) == [77, 3]

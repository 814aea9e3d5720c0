"""Ctrl-C: the first finishes the step and saves, the second stops now; either way the run can go on to the same end."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fault_kills import at_event, in_backward, opening, renaming
from fault_runs import STANDARD, At, Case, build, checkpoints, ending, finish, run_resumed, run_until_error, steps

from case_selection import mark_extended
from child_processes import call, succeed
from lowpeak.checkpoint.folders import last_checkpoint


def interrupt() -> None:
    """What Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_in_reward(trainer: Any, step: int) -> None:
    """Ctrl-C, once, while a rollout is judged after `step` steps."""
    reward = trainer.collector.panel.rewards[1]
    judge = reward.function

    async def judged(**columns: Any) -> list[float | None]:
        if trainer.state.global_step == step:
            reward.function = judge
            interrupt()
        return await judge(**columns)

    reward.function = judged


def interrupt_once(trainer: Any) -> None:
    interrupt_in_reward(trainer, 4)


def interrupt_twice_in_a_step(trainer: Any) -> None:
    interrupt_in_reward(trainer, 4)
    in_backward(trainer, 4, interrupt)


def interrupt_again_at(event: Callable[[], Any], trainer: Any) -> None:
    """A second Ctrl-C at one of Python's own events."""
    interrupt_in_reward(trainer, 4)
    at_event(event(), interrupt)


def resumed(place: Path) -> tuple[Any, ...]:
    succeed(run_resumed, STANDARD, place)
    return ending(place)


def test_the_first_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, left_alone):
    succeed(run_until_error, STANDARD, tmp_path, interrupt_once)
    saved = tmp_path / "run/checkpoint-5"
    message = (tmp_path / "error.txt").read_text()
    assert re.match(f"KeyboardInterrupt: .*{saved}.*resume_from_checkpoint=True", message), message
    assert "Ctrl-C" in (tmp_path / "log").read_text()
    assert checkpoints(tmp_path / "run") == ["checkpoint-5"]
    assert [row["step"] for row in steps(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert resumed(tmp_path) == left_alone(STANDARD)


TWICE: dict[str, Callable[[Any], None]] = {
    "in a step": interrupt_twice_in_a_step,
    "while it saves": partial(interrupt_again_at, partial(opening, "checkpoint-5.staged/lowpeak_state.json")),
    "while it takes the name": partial(interrupt_again_at, partial(renaming, "checkpoint-5.staged", "checkpoint-5")),
}


@pytest.mark.parametrize("moment", mark_extended(list(TWICE), ["in a step"]))
def test_the_second_stops_now_and_the_last_checkpoint_is_whole(tmp_path, left_alone, moment):
    succeed(run_until_error, STANDARD, tmp_path, TWICE[moment])
    assert (tmp_path / "error.txt").read_text() == "KeyboardInterrupt: "
    assert last_checkpoint(tmp_path / "run") == tmp_path / "run/checkpoint-3"
    assert checkpoints(tmp_path / "run") == ["checkpoint-3"]
    assert resumed(tmp_path) == left_alone(STANDARD)


def stop_and_go_on(case: Case, place: Path) -> None:
    trainer = build(case, place / "run")
    before = signal.getsignal(signal.SIGINT)
    interrupt_once(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is before
    trainer.train(resume_from_checkpoint=True)
    finish(trainer, place / "result.json")


def test_a_notebook_may_go_on_with_the_trainer_it_has(tmp_path, left_alone):
    succeed(stop_and_go_on, STANDARD, tmp_path)
    assert ending(tmp_path) == left_alone(STANDARD)


@pytest.mark.extended
def test_the_checkpoint_of_a_stopped_run_stays_also_where_the_best_one_is_older(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_completions/min_length", "eval_steps": 1}
    case = Case(args={**STANDARD.args, **best, "save_steps": 1, "greater_is_better": True})
    succeed(run_until_error, case, tmp_path, interrupt_once)
    assert f"{tmp_path / 'run/checkpoint-5'}" in (tmp_path / "error.txt").read_text()
    assert checkpoints(tmp_path / "run") == ["checkpoint-1", "checkpoint-5"]


def interrupt_at_the_end(trainer: Any) -> None:
    trainer.add_callback(At("on_train_end", 8, lambda model: interrupt()))


@pytest.mark.extended
@pytest.mark.parametrize(("strategy", "words"), [("steps", "checkpoint-8"), ("no", "step, 8")])
def test_after_the_last_step_it_says_what_there_is(tmp_path, strategy, words):
    succeed(run_until_error, Case(args={"save_strategy": strategy}), tmp_path, interrupt_at_the_end)
    assert words in (tmp_path / "error.txt").read_text()


def test_a_run_in_another_thread_trains_though_it_cannot_watch_for_signals(tmp_path, left_alone):
    assert call(train_in_a_thread, STANDARD, tmp_path) == 0
    assert ending(tmp_path) == left_alone(STANDARD)


def train_in_a_thread(case: Case, place: Path) -> None:
    trainer = build(case, place / "run")
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    finish(trainer, place / "result.json")

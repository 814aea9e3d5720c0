"""A disk that is full while a run saves: one sentence, the last checkpoint whole, and the run goes on from it."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from fault_runs import STANDARD, Case, checkpoints, ending, run_alone, run_resumed, run_until_error
from transformers import PrinterCallback, TrainerCallback

from children import succeed


class Fill(TrainerCallback):
    """From the end of step 4 on, no file may grow beyond `size` bytes: what a full disk says, without filling one."""

    def __init__(self, size: int) -> None:
        self._size = size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, resource.RLIM_INFINITY))


def fill_for_the_weights(trainer: Any) -> None:
    trainer.add_callback(Fill(50_000))


def fill_for_the_optimizer(trainer: Any) -> None:
    trainer.add_callback(Fill(100_000))


def fill_for_the_journal(trainer: Any) -> None:
    trainer.remove_callback(PrinterCallback)  # its lines fill the process's own log, which is not what is meant here
    trainer.add_callback(Fill(3_000))


def assert_told(place: Path, *words: str) -> None:
    """The error's class, its values and its reason stand in one line."""
    said = (place / "error.txt").read_text()
    assert [word for word in words if word not in said] == [], said
    assert "\n" not in said


@pytest.mark.parametrize("fill", [fill_for_the_weights, fill_for_the_optimizer])
def test_a_full_disk_while_saving_is_one_sentence_and_the_last_checkpoint_stays_whole(tmp_path, left_alone, fill):
    succeed(run_until_error, STANDARD, tmp_path, fill)
    run = tmp_path / "run"
    words = ("CheckpointError: ", f"{run / 'checkpoint-6'}: File too large", f"{run / 'checkpoint-3'}", "output_dir")
    assert_told(tmp_path, *words)
    assert checkpoints(run) == ["checkpoint-3"]
    succeed(run_resumed, STANDARD, tmp_path)
    assert ending(tmp_path) == left_alone(STANDARD)


def test_a_full_disk_while_the_journal_is_written_leaves_its_lines_whole(tmp_path, left_alone):
    succeed(run_until_error, STANDARD, tmp_path, fill_for_the_journal)
    assert_told(tmp_path, "CheckpointError: ", f"{tmp_path / 'run/journal'}: File too large", "output_dir")
    succeed(run_resumed, STANDARD, tmp_path)
    assert ending(tmp_path) == left_alone(STANDARD)


def test_a_disk_that_is_full_from_the_start_is_told_before_anything_trains(tmp_path):
    succeed(fail_at_the_start, STANDARD, tmp_path)
    assert_told(tmp_path, "ArgumentError: ", f"output_dir '{tmp_path / 'run'}'", "File too large")


def fail_at_the_start(case: Case, place: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        run_alone(case, place)
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        (place / "error.txt").write_text(f"{type(error).__name__}: {error}")

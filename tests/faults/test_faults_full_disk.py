"""A disk that is full while a run saves: one sentence, the last checkpoint whole, and the run goes on from it."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fault_runs import STANDARD, At, Case, checkpoints, ending, run_alone, run_resumed, run_until_error
from transformers import PrinterCallback

from child_processes import succeed


def fill(size: int, trainer: Any) -> None:
    """From the end of step 4 on, no file may grow beyond `size` bytes: what a full disk says, without filling one."""
    trainer.remove_callback(PrinterCallback)  # its lines fill the process's own log, which is not what is meant here
    limit = (size, resource.RLIM_INFINITY)
    trainer.add_callback(At("on_step_end", 4, lambda model: resource.setrlimit(resource.RLIMIT_FSIZE, limit)))


def assert_told(place: Path, *words: str) -> None:
    """The error's class, its values and its reason stand in one line."""
    message = (place / "error.txt").read_text()
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message


@pytest.mark.parametrize("size", [3_000, 50_000])  # journal, weights
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_and_the_journals_lines_stay_whole(
    tmp_path, left_alone, size
):
    succeed(run_until_error, STANDARD, tmp_path, partial(fill, size))
    run = tmp_path / "run"
    if size == 3_000:
        assert_told(tmp_path, "CheckpointError: ", f"{run / 'journal'}: File too large", "output_dir")
    else:
        words = (
            "CheckpointError: ",
            f"{run / 'checkpoint-6'}: File too large",
            f"{run / 'checkpoint-3'}",
            "output_dir",
        )
        assert_told(tmp_path, *words)
    assert checkpoints(run) == ["checkpoint-3"]
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

"""Checkpoint folders: the last one, pruning, clean-up after a kill, and the one that a run resumes from.

One run at a time locks the folder.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowpeak.checkpoint.atomic import stage_checkpoint
from lowpeak.checkpoint.folders import (
    LOCK_FILE,
    check_writable,
    clean_up_checkpoints,
    last_checkpoint,
    lock_run_folder,
    move_later_checkpoints,
    prune_checkpoints,
    resolve_checkpoint,
)
from lowpeak.checkpoint.run_state import RunState, capture_rng_state, save_run_state
from lowpeak.errors import ArgumentError, CheckpointError
from lowpeak.ranks import Ranks


def write_checkpoint(run_dir, step):
    with stage_checkpoint(run_dir / f"checkpoint-{step}", Ranks()) as stage:
        (stage / "weights").write_text("whole")
    return run_dir / f"checkpoint-{step}"


def names(run_dir):
    return sorted(path.name for path in run_dir.iterdir())


def folders(run_dir, *steps):
    for step in steps:
        (run_dir / f"checkpoint-{step}").mkdir()


def test_the_last_checkpoint_is_the_complete_one_of_the_highest_step(tmp_path):
    folders(tmp_path, 9, 10, 2, "11.staged", "12.removing", "13-old")
    (tmp_path / "checkpoint-99").write_text("a file")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert last_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("keep", "protected", "left"),
    [
        (None, [], [1, 2, 3, 10]),
        (0, [], [1, 2, 3, 10]),
        (9, [], [1, 2, 3, 10]),
        (2, [], [3, 10]),
        (1, [], [10]),
        (2, [1], [1, 10]),
        (1, [2], [2, 10]),
    ],
)
def test_pruning_removes_the_oldest_but_neither_the_newest_nor_the_protected(tmp_path, keep, protected, left):
    folders(tmp_path, 1, 2, 3, 10)
    prune_checkpoints(tmp_path, keep, [tmp_path / f"checkpoint-{step}" for step in protected])
    assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in left)


def test_checkpoints_of_later_steps_are_moved_to_a_new_folder_each_time(tmp_path):
    folders(tmp_path, 2, 4, 6)
    assert move_later_checkpoints(tmp_path, 4) == tmp_path / "earlier-1"
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    assert (tmp_path / "earlier-1" / "checkpoint-6").is_dir()
    assert move_later_checkpoints(tmp_path, 0) == tmp_path / "earlier-2"
    assert move_later_checkpoints(tmp_path, 0) is None


def test_clean_up_removes_only_what_killed_runs_left(tmp_path):
    whole = write_checkpoint(tmp_path, 5)
    leftovers = ("checkpoint-6.staged", "checkpoint-1.removing", "checkpoint-5.staged")
    for name in (*leftovers, "notes.staged", "final.removing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    clean_up_checkpoints(tmp_path)
    clean_up_checkpoints(tmp_path / "nowhere")
    assert names(tmp_path) == ["checkpoint-5", "final.removing", "notes.staged"]
    assert (whole / "weights").read_text() == "whole"


@pytest.mark.parametrize("moment", ["while", "after"])
def test_a_run_killed_around_a_replacement_keeps_the_complete_checkpoint(tmp_path, moment):
    final = write_checkpoint(tmp_path, 5)
    shutil.copytree(final, tmp_path / "checkpoint-5.replaced")
    if moment == "while":
        final.rename(tmp_path / "checkpoint-5.staged")
    (tmp_path / "checkpoint-5.replaced" / "old").write_text("")
    clean_up_checkpoints(tmp_path)
    assert names(tmp_path) == ["checkpoint-5"]
    assert (final / "weights").read_text() == "whole"
    assert (final / "old").exists() == (moment == "while")


def test_an_unwritable_output_folder_is_named_with_the_reason_also_for_root(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == []
    (tmp_path / "file").write_text("")
    reasons = {"file/run": os.strerror(errno.ENOTDIR), "file": os.strerror(errno.EEXIST)}
    for folder, reason in {**reasons, "/proc/lowpeak": "", "/proc/self/task": ""}.items():
        with pytest.raises(ArgumentError, match=f"output_dir '{tmp_path / folder}' .*: {reason}"):
            check_writable(tmp_path / folder)


def save(run_dir, step):
    with stage_checkpoint(run_dir / f"checkpoint-{step}", Ranks()) as stage:
        save_run_state(stage, RunState(step, {}, capture_rng_state()))
    return run_dir / f"checkpoint-{step}"


def test_a_run_resumes_from_its_last_complete_checkpoint_or_the_given_one(tmp_path):
    for step in (9, 10):
        save(tmp_path, step)
    (tmp_path / "checkpoint-11.staged").mkdir()
    (tmp_path / "checkpoint-12").mkdir()  # a copy that has only begun
    for nothing in (None, False):
        assert resolve_checkpoint(tmp_path, nothing) is None
    assert resolve_checkpoint(tmp_path, True) == tmp_path / "checkpoint-10"
    assert resolve_checkpoint(tmp_path / "elsewhere", str(tmp_path / "checkpoint-9")) == tmp_path / "checkpoint-9"


def test_an_invalid_checkpoint_is_named_with_a_valid_one(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    last = save(run, 8)
    leftovers = [save(run, 6).rename(run / f"checkpoint-6.{suffix}") for suffix in ("staged", "removing")]
    (other / "checkpoint-3").mkdir(parents=True)
    (other / "checkpoint-3" / "trainer_state.json").write_text("{}")
    cases = [
        (tmp_path / "nowhere", True, f"{tmp_path / 'nowhere'} "),
        (tmp_path, True, f"{tmp_path} "),
        (run, run / "checkpoint-5", f"{run / 'checkpoint-5'} .* {last}"),
        (tmp_path, run, f"{run} .* {last}"),
        (other, True, f"{other / 'checkpoint-3'} "),
        (other, other / "checkpoint-3", f"{other / 'checkpoint-3'} "),
        (run, 1, "folder.* 1"),
        *((run, leftover, f"{leftover} .* {last}") for leftover in leftovers),
    ]
    for run_dir, request, pattern in cases:
        with pytest.raises(CheckpointError, match=pattern):
            resolve_checkpoint(run_dir, request)


HOLD = """
import sys, pathlib
from lowpeak.checkpoint import lock_run_folder
with lock_run_folder(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_until_the_first_ends_or_is_killed(tmp_path):
    (tmp_path / LOCK_FILE).write_text("1234567" + "x" * 100)  # which is not truncated
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(CheckpointError, match=rf"\(process {holder.pid}\)"), lock_run_folder(tmp_path):
                pass
        finally:
            holder.kill()
    with pytest.raises(ZeroDivisionError), lock_run_folder(tmp_path):
        raise ZeroDivisionError
    with lock_run_folder(tmp_path):
        assert (tmp_path / LOCK_FILE).stat().st_size == 107


def test_a_lock_file_that_is_a_folder_or_a_link_is_refused(tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    for kind, make in {"folder": Path.mkdir, "link": lambda path: path.symlink_to(target)}.items():
        run_dir = tmp_path / kind
        run_dir.mkdir()
        make(run_dir / LOCK_FILE)
        with pytest.raises(CheckpointError, match=r"\.lowpeak\.lock"), lock_run_folder(run_dir):
            pass
    assert target.read_text() == "precious"

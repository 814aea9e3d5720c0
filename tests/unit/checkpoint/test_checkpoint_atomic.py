"""A checkpoint has its name only while it is complete, also after errors."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from lowpeak.checkpoint.atomic import stage_checkpoint
from lowpeak.checkpoint.folders import last_checkpoint
from lowpeak.errors import CheckpointError
from lowpeak.ranks import Ranks


def write_checkpoint(run_dir, step, text="whole"):
    with stage_checkpoint(run_dir / f"checkpoint-{step}", Ranks()) as stage:
        (stage / "inner").mkdir()
        (stage / "inner" / "weights").write_text(text)
    return run_dir / f"checkpoint-{step}"


def names(run_dir):
    return sorted(path.name for path in run_dir.iterdir())


def test_a_checkpoint_takes_its_name_only_when_the_block_ends(tmp_path):
    final = tmp_path / "run" / "checkpoint-7"
    with stage_checkpoint(final, Ranks()) as stage:
        (stage / "weights").write_text("x")
        assert names(tmp_path / "run") == ["checkpoint-7.staged"]
        assert last_checkpoint(tmp_path / "run") is None
    assert names(tmp_path / "run") == ["checkpoint-7"]
    assert (final / "weights").read_text() == "x"


def test_saving_the_same_step_again_replaces_the_checkpoint_and_a_killed_runs_stage(tmp_path):
    write_checkpoint(tmp_path, 3, "first")
    (tmp_path / "checkpoint-3.staged").mkdir()
    (tmp_path / "checkpoint-3.staged" / "stale").write_text("")
    final = write_checkpoint(tmp_path, 3, "second")
    assert (final / "inner" / "weights").read_text() == "second"
    assert not (final / "stale").exists()
    assert names(tmp_path) == ["checkpoint-3"]


@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt(), CheckpointError("mine"), RuntimeError("CUDA out of memory")]
)
def test_an_error_in_the_block_removes_the_stage_and_is_raised_unchanged(tmp_path, error):
    def fail(stage):
        (stage / "half").write_text("")
        raise error

    old = write_checkpoint(tmp_path, 2)
    with pytest.raises(type(error)) as caught, stage_checkpoint(tmp_path / "checkpoint-2", Ranks()) as stage:
        fail(stage)
    assert caught.value is error
    assert names(tmp_path) == ["checkpoint-2"]
    assert (old / "inner" / "weights").read_text() == "whole"


def on_a_full_disk(path):
    path.symlink_to("/dev/full")
    return path


def write_with_torch_through_python(path):
    with path.open("wb") as file:
        torch.save({"a": torch.zeros(10_000)}, file)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b"x"),
        lambda path: torch.save({"a": torch.zeros(10_000)}, path),
        write_with_torch_through_python,
    ],
)
def test_a_full_disk_is_one_error_however_the_file_is_written(tmp_path, write):
    last = write_checkpoint(tmp_path, 4)
    pattern = f"checkpoint-5: {os.strerror(errno.ENOSPC)}.* {last} "
    with (
        pytest.raises(CheckpointError, match=pattern) as caught,
        stage_checkpoint(tmp_path / "checkpoint-5", Ranks()) as stage,
    ):
        write(on_a_full_disk(stage / "weights"))
    assert caught.value.__cause__ is not None
    assert names(tmp_path) == ["checkpoint-4"]

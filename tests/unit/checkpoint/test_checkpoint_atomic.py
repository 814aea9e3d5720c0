"""A checkpoint has its whole name only while it is whole, whatever fails in between."""

import shutil
from pathlib import Path

import pytest
import torch

from lowpeak.checkpoint.atomic import check_writable, last_checkpoint, prune, stage_of, staged, sweep
from lowpeak.errors import ArgumentError, CheckpointError


def write_checkpoint(run_dir, step, text="whole"):
    with staged(run_dir / f"checkpoint-{step}") as stage:
        (stage / "inner").mkdir()
        (stage / "inner" / "weights").write_text(text)
    return run_dir / f"checkpoint-{step}"


def names(run_dir):
    return sorted(path.name for path in run_dir.iterdir())


def test_a_checkpoint_takes_its_name_only_when_the_block_ends(tmp_path):
    final = tmp_path / "run" / "checkpoint-7"
    with staged(final) as stage:
        (stage / "weights").write_text("x")
        assert stage == stage_of(final)
        assert names(tmp_path / "run") == ["checkpoint-7.staged"]
        assert last_checkpoint(tmp_path / "run") is None
    assert names(tmp_path / "run") == ["checkpoint-7"]
    assert (final / "weights").read_text() == "x"


def test_saving_the_same_step_again_replaces_the_checkpoint(tmp_path):
    write_checkpoint(tmp_path, 3, "first")
    final = write_checkpoint(tmp_path, 3, "second")
    assert (final / "inner" / "weights").read_text() == "second"
    assert names(tmp_path) == ["checkpoint-3"]


def test_a_stage_left_by_a_killed_run_does_not_leak_into_the_next(tmp_path):
    (tmp_path / "checkpoint-1.staged").mkdir()
    (tmp_path / "checkpoint-1.staged" / "stale").write_text("")
    assert not (write_checkpoint(tmp_path, 1) / "stale").exists()


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), CheckpointError("mine")])
def test_an_error_in_the_block_removes_the_stage_and_comes_out_as_it_is(tmp_path, error):
    def fail():
        with staged(tmp_path / "checkpoint-2") as stage:
            (stage / "half").write_text("")
            raise error

    old = write_checkpoint(tmp_path, 2)
    with pytest.raises(type(error)) as caught:
        fail()
    assert caught.value is error
    assert names(tmp_path) == ["checkpoint-2"]
    assert (old / "inner" / "weights").read_text() == "whole"


def test_a_runtime_error_that_is_not_about_writing_is_not_called_a_checkpoint_error(tmp_path):
    with pytest.raises(RuntimeError, match="out of memory") as caught, staged(tmp_path / "checkpoint-1"):
        raise RuntimeError("CUDA out of memory")
    assert not isinstance(caught.value, CheckpointError)


def write_with_python(path):
    path.write_bytes(b"x")


def write_with_torch(path):
    torch.save({"a": torch.zeros(10_000)}, path)


def write_with_torch_through_python(path):
    with path.open("wb") as file:
        torch.save({"a": torch.zeros(10_000)}, file)


@pytest.mark.parametrize("write", [write_with_python, write_with_torch, write_with_torch_through_python])
def test_a_full_disk_is_one_clear_sentence_however_the_file_is_written(tmp_path, write):
    def save():
        with staged(tmp_path / "checkpoint-5") as stage:
            (stage / "weights").symlink_to("/dev/full")
            write(stage / "weights")

    write_checkpoint(tmp_path, 4)
    with pytest.raises(CheckpointError) as caught:
        save()
    message = str(caught.value)
    assert "No space left on device" in message
    assert str(tmp_path / "checkpoint-5") in message
    assert f"the last good checkpoint {tmp_path / 'checkpoint-4'} is whole" in message
    assert names(tmp_path) == ["checkpoint-4"]


def test_the_last_checkpoint_is_the_highest_step_and_never_a_leftover(tmp_path):
    for step in (9, 10, 2):
        write_checkpoint(tmp_path, step)
    for leftover in ("checkpoint-11.staged", "checkpoint-12.removing", "checkpoint-13-old"):
        (tmp_path / leftover).mkdir()
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
    for step in (1, 2, 3, 10):
        write_checkpoint(tmp_path, step)
    prune(tmp_path, keep, [tmp_path / f"checkpoint-{step}" for step in protected])
    assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in left)


def test_a_sweep_removes_what_killed_runs_left_and_nothing_else(tmp_path):
    whole = write_checkpoint(tmp_path, 5)
    for name in (
        "checkpoint-6.staged",
        "checkpoint-1.removing",
        "checkpoint-5.staged",
        "notes.staged",
        "final.removing",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    sweep(tmp_path)
    sweep(tmp_path / "nowhere")
    assert names(tmp_path) == ["checkpoint-5", "final.removing", "notes.staged"]
    assert (whole / "inner" / "weights").read_text() == "whole"


def test_a_run_killed_while_it_replaces_a_checkpoint_gets_the_old_one_back(tmp_path):
    final = write_checkpoint(tmp_path, 5, "old")
    final.rename(tmp_path / "checkpoint-5.replaced")
    (tmp_path / "checkpoint-5.staged").mkdir()
    sweep(tmp_path)
    assert names(tmp_path) == ["checkpoint-5"]
    assert (final / "inner" / "weights").read_text() == "old"


def test_a_run_killed_after_it_replaced_a_checkpoint_keeps_the_new_one(tmp_path):
    final = write_checkpoint(tmp_path, 5, "new")
    shutil.copytree(final, tmp_path / "checkpoint-5.replaced")
    sweep(tmp_path)
    assert names(tmp_path) == ["checkpoint-5"]
    assert (final / "inner" / "weights").read_text() == "new"


def test_an_output_folder_that_can_be_written_is_made_and_left_empty(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == []


def test_an_output_folder_that_cannot_be_written_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ArgumentError, match=r"output_dir '.*file/run' cannot be written: Not a directory; name a folder"
    ):
        check_writable(tmp_path / "file" / "run")
    with pytest.raises(ArgumentError, match=r"output_dir '.*file' cannot be written: File exists"):
        check_writable(tmp_path / "file")


@pytest.mark.parametrize("folder", ["/proc/lowpeak", "/proc/self/task"])
def test_root_too_is_told_that_a_folder_cannot_be_made_or_written(folder):
    with pytest.raises(ArgumentError, match=folder):
        check_writable(Path(folder))

"""A checkpoint has its name only while it is complete, also after errors and kills."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time

import pandas
import polars
import pytest
import torch

from lowpeak.checkpoint.atomic import stage_checkpoint
from lowpeak.checkpoint.folders import clean_up_checkpoints, last_checkpoint
from lowpeak.errors import CheckpointError
from lowpeak.journal import Journal, read_steps


def write_checkpoint(run_dir, step, text="whole"):
    with stage_checkpoint(run_dir / f"checkpoint-{step}") as stage:
        (stage / "inner").mkdir()
        (stage / "inner" / "weights").write_text(text)
    return run_dir / f"checkpoint-{step}"


def names(run_dir):
    return sorted(path.name for path in run_dir.iterdir())


def test_a_checkpoint_takes_its_name_only_when_the_block_ends(tmp_path):
    final = tmp_path / "run" / "checkpoint-7"
    with stage_checkpoint(final) as stage:
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
    with pytest.raises(type(error)) as caught, stage_checkpoint(tmp_path / "checkpoint-2") as stage:
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
    told = f"checkpoint-5: {os.strerror(errno.ENOSPC)}.* {last} "
    with pytest.raises(CheckpointError, match=told) as caught, stage_checkpoint(tmp_path / "checkpoint-5") as stage:
        write(on_a_full_disk(stage / "weights"))
    assert caught.value.__cause__ is not None
    assert names(tmp_path) == ["checkpoint-4"]


NUM_KILLS = 20
NUM_FILES = 3

# Saving needs no torch, so a process is up in a tenth of a second. Each step is saved twice: the second replaces the first.
SAVE_IN_A_LOOP = f"""
import sys
from pathlib import Path
from lowpeak.checkpoint import clean_up_checkpoints, last_checkpoint, prune_checkpoints, stage_checkpoint
from lowpeak.journal import Journal

run_dir = Path(sys.argv[1])
clean_up_checkpoints(run_dir)
last = last_checkpoint(run_dir)
step = int(last.name.removeprefix("checkpoint-")) if last else 0
journal = Journal(run_dir)
if last:
    journal.resume_at(step)
while True:
    step += 1
    journal.write_step(step, {{"reward": step / 7, "loss": float("nan")}})
    journal.write_rollout(step, [{{"prompt": "p" * 50, "completion": "c" * 900, "reward": 1.0}}] * 4)
    journal.sync()
    for _ in range(2):
        with stage_checkpoint(run_dir / f"checkpoint-{{step}}") as stage:
            for number in range({NUM_FILES}):
                (stage / f"part-{{number}}").write_text(f"{{step}}" * 2000 + "end")
    prune_checkpoints(run_dir, keep=2)
    print("saved", flush=True)
"""


def whole(checkpoint):
    step = checkpoint.stem.removeprefix("checkpoint-")
    parts = [checkpoint / f"part-{number}" for number in range(NUM_FILES)]
    return all(part.is_file() and part.read_text() == step * 2000 + "end" for part in parts)


def test_a_process_killed_at_random_moments_leaves_complete_checkpoints(tmp_path):
    moments = random.Random(0)
    reached = 0
    leftovers = set()
    command = [sys.executable, "-c", SAVE_IN_A_LOOP, str(tmp_path)]
    for _ in range(NUM_KILLS):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "saved\n"
            time.sleep(moments.uniform(0.0, 0.1))
            process.kill()
        assert process.returncode == -signal.SIGKILL
        found = [path for path in tmp_path.iterdir() if path.is_dir()]
        leftovers |= {path.suffix for path in found}
        assert all(whole(path) for path in found if path.suffix in ("", ".replaced"))
        clean_up_checkpoints(tmp_path)
        last = last_checkpoint(tmp_path)
        step = int(last.name.removeprefix("checkpoint-"))
        assert step > reached  # it went on where it was, and saved
        reached = step
        check_journal(tmp_path, step)
    assert len(leftovers) > 1  # some kills did hit a save or a removal


def check_journal(run_dir, step):
    pandas.read_json(run_dir / "steps.jsonl", lines=True)  # as the kill left it, before anybody repairs it
    pandas.read_json(run_dir / "rollouts.jsonl", lines=True)
    Journal(run_dir).resume_at(step)
    assert [row["step"] for row in read_steps(run_dir)] == list(range(1, step + 1))
    for name, lines_per_step in (("steps", 1), ("rollouts", 4)):
        assert len(pandas.read_json(run_dir / f"{name}.jsonl", lines=True)) == step * lines_per_step
        frame = polars.read_ndjson(run_dir / f"{name}.jsonl", infer_schema_length=None)
        assert frame["step"].n_unique() == step

"""Two runs do not write into one folder at a time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lowpeak.checkpoint.lock import LOCK_FILE, only_run
from lowpeak.errors import CheckpointError

HOLD = """
import sys, pathlib
from lowpeak.checkpoint.lock import only_run
with only_run(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_by_the_process_that_holds_the_folder(tmp_path):
    with only_run(tmp_path), pytest.raises(CheckpointError, match=f"process {os.getpid()}"), only_run(tmp_path):
        pass


def test_the_folder_is_free_after_a_run_and_after_a_killed_one(tmp_path):
    with only_run(tmp_path):
        pass
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"process {holder.pid}"), only_run(tmp_path):
            pass
    finally:
        holder.kill()
        holder.wait(timeout=20)
    with only_run(tmp_path):
        pass


def test_a_run_that_raised_leaves_the_folder_free(tmp_path):
    with pytest.raises(ZeroDivisionError), only_run(tmp_path):
        raise ZeroDivisionError
    with only_run(tmp_path):
        pass


def test_a_lock_that_is_a_folder_is_told(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    with (
        pytest.raises(CheckpointError, match=r"\.lowpeak\.lock cannot be opened \(Is a directory\)"),
        only_run(tmp_path),
    ):
        pass


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / LOCK_FILE).symlink_to(target)
    with (
        pytest.raises(CheckpointError, match=r"\.lowpeak\.lock is a symbolic link.*remove the link"),
        only_run(tmp_path),
    ):
        pass
    assert target.read_text() == "precious"


def test_a_lock_with_other_content_is_not_truncated(tmp_path):
    (tmp_path / LOCK_FILE).write_text("1234567" + "x" * 100)
    with only_run(tmp_path), pytest.raises(CheckpointError, match=rf"\(process {os.getpid()}\)"), only_run(tmp_path):
        pass
    assert (tmp_path / LOCK_FILE).stat().st_size == 107

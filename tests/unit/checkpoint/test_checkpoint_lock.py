"""Two runs do not write into one folder at a time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lowpeak.checkpoint.lock import only_run
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

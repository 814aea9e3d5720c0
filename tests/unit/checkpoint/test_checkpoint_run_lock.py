"""The lock of an output folder: one run at a time, until it ends or is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lowpeak.checkpoint import LOCK_FILE, lock_run_folder
from lowpeak.errors import CheckpointError

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

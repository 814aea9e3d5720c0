"""Processes that end with the one that started them, whatever ended it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from process_ends import are_gone, is_alive

SECONDS = 60  # until processes have started, or have ended; by themselves they would run for ten minutes

LEADER = """
import os, time
from multiprocessing import get_context
from lowpeak.watchdog.orphans import exit_with_parent, watch_parent_in_forks
def tell():
    open(f'{os.getpid()}.pid', 'w').close()
    time.sleep(600)
if __name__ == '__main__':
    exit_with_parent(first=True)
    watch_parent_in_forks()
    get_context('fork').Process(target=tell).start()
    tell()
"""

PARENT = """
import os, subprocess, sys, time
environ = {**os.environ, 'LOWPEAK_PARENT': str(os.getpid())}
subprocess.Popen([sys.executable, 'leader.py'], env=environ, start_new_session=True)
time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["parent", "leader"])
def test_a_process_group_ends_when_its_parent_or_leader_is_killed(tmp_path, killed):
    (tmp_path / "leader.py").write_text(LEADER)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=environ) as parent:
        try:
            until = time.monotonic() + SECONDS
            while len(pids := [int(file.stem) for file in tmp_path.glob("*.pid")]) < 2:
                assert time.monotonic() < until
                time.sleep(0.05)
            leader = next(pid for pid in pids if os.getpgid(pid) == pid)
            time.sleep(1)
            assert all(is_alive(pid) for pid in pids)
            os.kill(parent.pid if killed == "parent" else leader, signal.SIGKILL)
            assert are_gone(pids if killed == "parent" else set(pids) - {leader}, SECONDS)
        finally:
            parent.kill()

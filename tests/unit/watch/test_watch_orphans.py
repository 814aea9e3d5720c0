"""Processes that end with the one that started them, whatever ended it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from processes import are_gone, is_alive

SECONDS = 60  # until processes have started, or have ended; by themselves they would run for ten minutes

LEADER = """
import os, time
from multiprocessing import get_context
from lowpeak.watch.orphans import end_with_parent, watch_forks
def tell():
    open(f'{os.getpid()}.pid', 'w').close()
    time.sleep(600)
if __name__ == '__main__':
    end_with_parent(first=True)
    watch_forks()
    get_context('fork').Process(target=tell).start()
    tell()
"""

PARENT = """
import os, subprocess, sys, time
environ = {**os.environ, 'LOWPEAK_PARENT': str(os.getpid())}
subprocess.Popen([sys.executable, 'leader.py'], env=environ, start_new_session=True)
time.sleep(600)
"""


def started(folder):
    """A parent, and the pids of the group that its child leads: the leader and what it forked."""
    (folder / "leader.py").write_text(LEADER)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=folder, env=environ)
    until = time.monotonic() + SECONDS
    while len(pids := [int(file.stem) for file in folder.glob("*.pid")]) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    return parent, pids


def test_a_group_ends_when_its_parent_was_killed(tmp_path):
    parent, pids = started(tmp_path)
    time.sleep(1)
    assert all(is_alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    assert are_gone(pids, SECONDS)


def test_what_a_killed_leader_leaves_behind_ends_too(tmp_path):
    parent, pids = started(tmp_path)
    leader = next(pid for pid in pids if os.getpgid(pid) == pid)
    (forked,) = set(pids) - {leader}
    try:
        os.kill(leader, signal.SIGKILL)
        assert are_gone([forked], SECONDS)
    finally:
        parent.kill()
        parent.wait()

"""A rank that has succeeded ends with status 0, whatever its process group's threads still do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from spawn import PATH

from child_processes import QUIET, free_port

# Rank 0 ends while its last collective is under way, in a group that an object outside Python's reach refers to.
SCRIPT = """
import ctypes, os, time, torch, torch.distributed as dist
from lowpeak.ranks import destroy_group_at_exit

class Slow:
    def __del__(self):
        time.sleep(0.5)

slow = Slow()  # Python takes a moment to end, as with a model in memory

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
destroy_group_at_exit()
if os.environ["RANK"] == "0":
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    time.sleep(0.5)  # rank 1 is in the collective
    dist.all_reduce(torch.ones(3), async_op=True)
else:
    dist.all_reduce(torch.ones(3))
"""


@pytest.mark.extended
def test_a_collective_that_finishes_while_python_ends_does_not_abort_the_process():
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    env = {**os.environ, **QUIET, **meet, "PYTHONPATH": PATH}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)

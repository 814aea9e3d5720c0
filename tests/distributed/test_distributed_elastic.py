"""Under real torchrun with real kill -9: the run is started again, goes on by itself, and comes to the same end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fault_ranks
import pytest
from setups import seen
from spawn import PATH, TESTS

from child_processes import QUIET, free_port, run_ranks
from lowpeak.journal import read_rows, read_steps


def run_under_torchrun(strategy: str, out: Path) -> tuple[dict[str, Any], str]:
    """Two ranks that may be started again once; torchrun looks after them so rarely that a rank has said why it ends."""
    words = ["--nproc_per_node", "2", "--max-restarts", "1", "--monitor-interval", "3"]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [str(TESTS / "distributed/run_elastic.py"), strategy, str(out)]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, *command],
        env={**os.environ, **QUIET, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((out / "result.json").read_text()), ended.stderr


@pytest.mark.release
def test_a_zero3_run_that_runs_out_of_memory_goes_on_by_itself_with_smaller_sizes(tmp_path):
    found, told = run_under_torchrun("zero3", tmp_path)
    assert (found["restarts"], found["steps"], found["lowered"]) == (1, 6, ["micro_batch_tokens"])
    assert f"Restart 1: resuming from {tmp_path / 'run/checkpoint-2'}." in told
    events = [row["event"] for row in read_rows(tmp_path / "run/journal", "events")]
    assert events == ["resumed", "out of memory"]


def test_a_run_whose_rank_is_killed_goes_on_by_itself_with_nothing_doubled(tmp_path):
    found, told = run_under_torchrun("fsdp2", tmp_path)
    assert (found["restarts"], found["steps"]) == (1, 6)
    assert f"Restart 1: resuming from {tmp_path / 'run/checkpoint-2'}." in told
    assert "rank 1 is gone" in told
    assert [row["step"] for row in read_steps(tmp_path / "run/journal")] == [1, 2, 3, 4, 5, 6]
    (event,) = read_rows(tmp_path / "run/journal", "events")
    assert (event["step"], event["event"], event["restarts"]) == (2, "resumed", 1)
    lines = (tmp_path / "run/journal/rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [step for step in range(1, 7) for _ in range(8)]
    run_ranks(fault_ranks.leave_alone, tmp_path / "alone", "fsdp2")
    assert found["weights"] == seen(tmp_path / "alone")[0]["weights"]

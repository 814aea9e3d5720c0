"""Under real torchrun with real kill -9: the run is started again, goes on by itself, and comes to the same end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fault_ranks
import pytest
from forked import run_ranks
from spawn import QUIET, TESTS, free_port

from lowpeak.journal import read_steps


def torchrun(script: str, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Two ranks that may be started again once; torchrun looks after them so rarely that a rank has said why it ends."""
    paths = [str(TESTS.parent / "src"), str(TESTS), str(TESTS / "distributed")]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--max-restarts",
        "1",
        "--monitor-interval",
        "3",
    ]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return subprocess.run(
        [sys.executable, *launcher, *address, str(TESTS / "distributed" / script), *arguments],
        env={**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_whose_rank_is_killed_goes_on_by_itself_with_nothing_doubled(strategy: str, tmp_path: Path) -> None:
    ended = torchrun("run_elastic.py", strategy, str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["restarts"], found["steps"]) == (1, 6)
    assert f"Started again (restart 1): going on from {tmp_path / 'run/checkpoint-2'}." in ended.stderr
    assert "rank 1 is gone" in ended.stderr
    assert [row["step"] for row in read_steps(tmp_path / "run/journal")] == [1, 2, 3, 4, 5, 6]
    lines = (tmp_path / "run/journal/rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [step for step in range(1, 7) for _ in range(8)]
    run_ranks(fault_ranks.leave_alone, tmp_path / "alone", strategy)
    assert found["weights"] == fault_ranks.seen(tmp_path / "alone")[0]["weights"]

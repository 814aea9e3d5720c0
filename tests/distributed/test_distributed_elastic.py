"""Under torchrun's agent with real kill -9: the run is started again, goes on by itself, and comes to the same end.

Ranks are forked from the agent's process, which has imported everything; commands of torchrun are in test_distributed_launch.py.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_ranks
import pytest
import torch
from setups import build, prepare, seen, spread, weights
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from child_processes import free_port, run_ranks, succeed, succeed_on_ranks
from file_damage import harm
from lowpeak.journal import read_rows, read_steps


def run_under_agent(train: Callable[[Path], None], place: Path, port: int) -> None:
    """Two ranks that may be started again once; the agent looks so rarely that a rank has said why it ends."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0}, max_restarts=1, monitor_interval=3, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, train)(place)


def is_fatal(state: Any) -> bool:
    """Whether this is rank 1 in the fourth step of the run's first life."""
    return (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], state.global_step) == ("0", "1", 3)


def be_killed(place: Path, resume: str | None = None) -> None:
    """Rank 1 dies while it judges the fourth rollout."""

    def killed_once(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        if is_fatal(trainer_state):
            os.kill(os.getpid(), signal.SIGKILL)
        return spread(completions)

    killed_once.__name__ = spread.__name__  # rewards are known by their names
    train(build_saving("fsdp2", place, killed_once, resume_from_checkpoint=resume), place)


def exhaust_memory(place: Path) -> None:
    """Rank 1 runs out of memory in a layer of the fourth step."""
    trainer = build_saving("zero3", place, spread)

    def raise_error(module: Any, args: Any) -> None:
        if module.training and is_fatal(trainer.state):
            raise torch.OutOfMemoryError("injected")

    trainer.model.model.layers[0].register_forward_pre_hook(raise_error)
    train(trainer, place)


def build_saving(strategy: str, place: Path, reward: Any, **more: Any) -> Any:
    arguments = {**prepare(strategy), "max_steps": 6, "save_strategy": "steps", "save_steps": 2, **more}
    return build("GRPO", place / "run", arguments, rewards=reward)


def train(trainer: Any, place: Path) -> None:
    """Train as the arguments of a first start say: nothing in them asks to resume."""
    try:
        trainer.train()
    except BaseException:
        traceback.print_exc()
        raise
    found = {"weights": weights(trainer), "lowered": sorted(trainer.run.sizes.lowered)}
    found |= {"restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "steps": trainer.state.global_step}
    if trainer.is_world_process_zero():
        (place / "result.json").write_text(json.dumps(found))


def restarted(train: Callable[[Path], None], place: Path) -> dict[str, Any]:
    """What a run came to whose ranks were started twice, and went on from its last checkpoint."""
    succeed(run_under_agent, train, place, free_port())
    found = json.loads((place / "result.json").read_text())
    assert (found["restarts"], found["steps"]) == (1, 6)
    return found


@pytest.mark.release
def test_a_zero3_run_that_runs_out_of_memory_goes_on_by_itself_with_smaller_sizes(tmp_path):
    assert restarted(exhaust_memory, tmp_path)["lowered"] == ["micro_batch_tokens"]
    events = [row["event"] for row in read_rows(tmp_path / "run/journal", "events")]
    assert events == ["resumed", "out of memory"]


def test_a_run_whose_rank_is_killed_goes_on_by_itself_with_nothing_doubled(tmp_path):
    found = restarted(be_killed, tmp_path)
    output = (tmp_path / "log").read_text()
    assert f"Restart 1: resuming from {tmp_path / 'run/checkpoint-2'}." in output
    assert "rank 1 is gone" in output
    assert [row["step"] for row in read_steps(tmp_path / "run/journal")] == [1, 2, 3, 4, 5, 6]
    (event,) = read_rows(tmp_path / "run/journal", "events")
    assert (event["step"], event["event"], event["restarts"]) == (2, "resumed", 1)
    lines = (tmp_path / "run/journal/rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [step for step in range(1, 7) for _ in range(8)]
    run_ranks(fault_ranks.leave_alone, tmp_path / "alone", "fsdp2")
    assert found["weights"] == seen(tmp_path / "alone")[0]["weights"]


def train_automatically(place: Path) -> None:
    be_killed(place, resume="auto")


@pytest.mark.extended
def test_a_restart_and_a_new_launch_of_a_run_that_resumes_by_itself_agree_on_its_checkpoint(tmp_path):
    restarted(train_automatically, tmp_path)
    (event,) = read_rows(tmp_path / "run/journal", "events")
    assert (event["step"], event["event"], event["restarts"]) == (2, "resumed", 1)
    harm(tmp_path / "run/checkpoint-6/trainer_state.json", "truncated")  # a file that one of the ranks reads
    succeed_on_ranks(fault_ranks.resume_automatically, tmp_path)
    found = seen(tmp_path)
    assert [each["steps"] for each in found] == [6, 6]
    assert [row["step"] for row in read_steps(tmp_path / "run/journal")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read_rows(tmp_path / "run/journal", "events")] == [2, 4]

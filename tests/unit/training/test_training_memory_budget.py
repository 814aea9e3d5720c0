"""A run within a memory budget: its sizes, its journal, its error if nothing fits, and the correction after ten steps."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from lowpeak import GRPOConfig
from lowpeak.arguments.base import MemorySettings, parse_budget
from lowpeak.arguments.online import resolve_online
from lowpeak.errors import ArgumentError
from lowpeak.memory.device_memory import free_bytes
from lowpeak.ranks import Ranks
from lowpeak.sizes.memory_budget import budget_bytes
from lowpeak.sizes.planned_memory import RunDescription
from small_runs import journal, make
from tiny_models import tiny_model

GIB, MIB = 1 << 30, 1 << 20
AUTO = {"micro_batch_tokens": None, "logprob_chunk_size": None}
CPU = torch.device("cpu")


# the argument


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("auto", "auto"),
        (0.5, 0.5),
        ("0.9", 0.9),
        (1, 1.0),
        ("20GiB", 20 * GIB),
        (1e9, 10**9),
        ("4096", 4096),
        *((value, None) for value in (0, -1, 1.5, "much", "0", True, float("inf"))),
    ],
)
def test_a_budget_is_bytes_a_fraction_or_auto(tmp_path, budget, expected):
    assert parse_budget(budget) == expected
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, memory_budget=budget)
    if expected is None:
        with pytest.raises(ArgumentError, match="memory_budget"):
            resolve_online(args, 1, 1)
        return
    memory = resolve_online(args, 1, 1).memory
    assert memory.memory_budget == expected
    # The plan is there at the start, and the journal gets it.
    assert memory.plan_memory


def test_a_budget_is_of_what_the_process_has_and_could_have():
    could = psutil.Process().memory_info().rss + free_bytes(CPU)
    whole, half = (budget_bytes(MemorySettings(memory_budget=budget), CPU, Ranks()) for budget in ("auto", 0.5))
    assert whole == pytest.approx(could, rel=0.2)
    assert half == pytest.approx(whole / 2, rel=0.2)
    assert budget_bytes(MemorySettings(memory_budget=GIB), CPU, Ranks()) == GIB
    assert budget_bytes(MemorySettings(), CPU, Ranks()) is None


def test_a_budget_beyond_the_device_is_an_error():
    with pytest.raises(ArgumentError, match=f"memory_budget={1 << 60} .*cpu"):
        budget_bytes(MemorySettings(memory_budget=1 << 60), CPU, Ranks())


# sizes


def budget_beyond_now(mebibytes: int) -> int:
    """What the process has now and some MiB."""
    return psutil.Process().memory_info().rss + mebibytes * MIB


@pytest.fixture
def answer_plans(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """A function that replaces the planning process by one with this output and status."""

    def replace_process(text: str, status: int) -> None:
        def start(description: RunDescription, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
            (folder / "output").write_text(text)
            return subprocess.Popen(["sh", "-c", f"exit {status}"]), folder / "output"

        for module in ("online", "offline"):
            monkeypatch.setattr(f"lowpeak.trainers.{module}.start_plan", start)

    return replace_process


def test_sizes_are_those_of_the_plan_and_log_and_journal_name_them(tmp_path, caplog, answer_plans):
    sizes, phases = {"micro_batch_tokens": 320, "logprob_chunk_size": 32}, {"train": 5 * MIB, "save": MIB}
    plan = {"problem": "", "sizes": sizes, "phases": phases, "peak": 5 * MIB, "peak_phase": "train"}
    answer_plans(json.dumps(plan), 0)
    budget = budget_beyond_now(100)
    with caplog.at_level(logging.INFO, "lowpeak"):
        run = make("SFT", tmp_path, memory_budget=budget, **AUTO)
    assert {name: getattr(run.run.sizes, name) for name in sizes} == sizes
    (message,) = [record.getMessage() for record in caplog.records if "Memory budget" in record.getMessage()]
    assert "micro_batch_tokens=320, logprob_chunk_size=32" in message
    run.train()
    (first, *_) = journal(tmp_path)
    assert first["memory_budget"] == run.run.memory_budget == budget
    assert first["planned_memory/train"] - first["planned_memory/save"] == 4 * MIB


def test_a_run_that_cannot_fit_stops_before_it_trains(tmp_path):
    changes = {"memory_budget": budget_beyond_now(-40), "max_length": 256, "per_device_train_batch_size": 64, **AUTO}
    sizes = r"backward .*micro_batch_tokens=256, logprob_chunk_size=16\).*memory_budget"
    with pytest.raises(ArgumentError, match=sizes):
        make("SFT", tmp_path, tiny_model(hidden=128, context=512), **changes)
    assert not (tmp_path / "journal").exists()


def test_without_a_plan_one_warning_says_why_and_sizes_are_shares_of_what_the_budget_leaves(
    tmp_path, caplog, answer_plans
):
    answer_plans("a line\nNoSuchModule: why", 1)
    with caplog.at_level(logging.WARNING, "lowpeak"):
        run = make("GRPO", tmp_path, memory_budget=budget_beyond_now(1024), **AUTO)
    assert run.run.sizes.kv_cache_bytes <= GIB // 4
    (message,) = [r.getMessage() for r in caplog.records if "memory_budget" in r.getMessage()]
    assert "shares of free memory" in message
    assert "NoSuchModule: why" in message

"""A run within a memory budget: its sizes, its journal, its error if nothing fits, and the correction after ten steps."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from case_selection import mark_extended
from lowpeak import GRPOConfig, GRPOTrainer
from lowpeak.arguments.base import MemorySettings, parse_budget
from lowpeak.arguments.online import resolve_online
from lowpeak.errors import ArgumentError
from lowpeak.memory.device_memory import free_bytes
from lowpeak.ranks import Ranks
from lowpeak.sizes.memory_budget import PassPeak, budget_bytes, corrected_tokens
from small_runs import COMMON, ONLINE, SAVED, TOKENIZER, journal, make, ones, rows
from tiny_models import tiny_model

GIB, MIB = 1 << 30, 1 << 20
AUTO = {"micro_batch_tokens": None, "logprob_chunk_size": None}
CPU = torch.device("cpu")


# the argument


@pytest.mark.parametrize(
    ("said", "expected"),
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
def test_a_budget_is_bytes_a_fraction_or_auto(tmp_path, said, expected):
    assert parse_budget(said) == expected
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, memory_budget=said)
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
    whole, half = (budget_bytes(MemorySettings(memory_budget=said), CPU, Ranks()) for said in ("auto", 0.5))
    assert whole == pytest.approx(could, rel=0.2)
    assert half == pytest.approx(whole / 2, rel=0.2)
    assert budget_bytes(MemorySettings(memory_budget=GIB), CPU, Ranks()) == GIB
    assert budget_bytes(MemorySettings(), CPU, Ranks()) is None


def test_a_budget_beyond_the_device_is_an_error():
    with pytest.raises(ArgumentError, match=f"memory_budget={1 << 60} .*cpu"):
        budget_bytes(MemorySettings(memory_budget=1 << 60), CPU, Ranks())


# sizes


def budgeted(kind: str, folder: Path, mebibytes: int, **changes: Any) -> Any:
    """A trainer whose budget is what the process has now and some MiB."""
    budget = psutil.Process().memory_info().rss + mebibytes * MIB
    data = {"data": rows(64)} if kind == "GRPO" else {"max_length": 256}
    given = {"max_completion_length": 200, **AUTO, **changes} if kind == "GRPO" else {**AUTO, **changes}
    model = tiny_model(hidden=128, context=512)
    return make(kind, folder, model, memory_budget=budget, per_device_train_batch_size=64, **data, **given)


@pytest.mark.processes
@pytest.mark.extended
@pytest.mark.parametrize("kind", mark_extended(["GRPO", "SFT"], ["SFT"], "release"))
def test_sizes_follow_from_the_plan_and_grow_with_the_budget(kind, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "lowpeak"):
        small, large = (budgeted(kind, tmp_path / str(more), more) for more in (100, 600))
    told = [record.getMessage() for record in caplog.records if "Memory budget" in record.getMessage()]
    assert len(told) == 2
    assert f"micro_batch_tokens={small.run.sizes.micro_batch_tokens}" in told[0]
    assert small.run.sizes.micro_batch_tokens < large.run.sizes.micro_batch_tokens
    large.train()
    (first, *_) = journal(tmp_path / "600")
    assert first["memory_budget"] == large.run.memory_limit.budget
    planned = {name: value for name, value in first.items() if name.startswith("planned_memory/")}
    assert {"planned_memory/train", "planned_memory/optimizer", "planned_memory/save"} <= planned.keys()
    assert max(planned.values()) <= first["memory_budget"] + 8 * MIB  # the process grows a little after the plan


@pytest.mark.processes
def test_a_run_that_cannot_fit_stops_before_it_trains(tmp_path):
    with pytest.raises(
        ArgumentError, match=r"backward .*micro_batch_tokens=256, logprob_chunk_size=16\).*memory_budget"
    ):
        budgeted("SFT", tmp_path, -40)
    assert not (tmp_path / "journal").exists()


@pytest.mark.release
@pytest.mark.processes
def test_an_explicit_size_is_what_to_lower(tmp_path):
    with pytest.raises(ArgumentError, match=r"micro_batch_tokens \(now 16384\)"):
        budgeted("SFT", tmp_path, 100, micro_batch_tokens=16384)


class Unknown(GRPOConfig):
    """A config that the planning process cannot read, since it does not find this file."""


@pytest.mark.extended
@pytest.mark.processes
def test_without_a_plan_one_warning_says_so_and_sizes_are_shares_of_what_the_budget_leaves(tmp_path, caplog):
    def shares(budget: int) -> int:
        given = {**COMMON, **ONLINE, **AUTO, "num_generations": 4, "output_dir": str(tmp_path)}
        args = Unknown(**given, memory_budget=budget)
        trainer = GRPOTrainer(tiny_model(), ones, args, train_dataset=rows(), processing_class=TOKENIZER)
        return trainer.run.sizes.kv_cache_bytes

    resident = psutil.Process().memory_info().rss
    with caplog.at_level(logging.WARNING, "lowpeak"):
        assert shares(resident + GIB) <= GIB // 4
    (told,) = [r.getMessage() for r in caplog.records if "memory_budget" in r.getMessage()]
    assert "shares of free memory" in told
    assert "test_training_memory_budget" in told


# the correction


def test_a_peak_near_the_limit_halves_micro_batches():
    assert corrected_tokens(1024, [PassPeak(96, 50)], 100, are_full=True) == 512
    assert corrected_tokens(1024, [PassPeak(40, 30), PassPeak(96, 50)], 100, are_full=False) == 512


def test_a_peak_within_the_limit_stays():
    assert corrected_tokens(1024, [PassPeak(90, 50)], 100, are_full=True) == 1024


def test_micro_batches_grow_while_the_predicted_peak_leaves_room():
    # 40 + 2 * 20 = 80, and 40 + 4 * 20 = 120.
    assert corrected_tokens(1024, [PassPeak(60, 40)], 100, are_full=True) == 2048
    # 10 + 4 * 10 = 50; more than fourfold is too far from what was measured.
    assert corrected_tokens(1024, [PassPeak(20, 10)], 100, are_full=True) == 4096
    # Of two passes both must stay: 0 + 2 * 50 = 100.
    assert corrected_tokens(1024, [PassPeak(20, 10), PassPeak(50, 0)], 100, are_full=True) == 1024


def test_micro_batches_that_the_tokens_did_not_limit_do_not_grow():
    assert corrected_tokens(1024, [PassPeak(20, 10)], 100, are_full=False) == 1024


def limited(trainer: Any, budget: int, tokens: int) -> Any:
    """The trainer with another limit and other automatic micro-batches."""
    run = trainer.run.with_sizes(replace(trainer.run.sizes, micro_batch_tokens=tokens))
    limit = replace(trainer.run.memory_limit, budget=budget, corrects=True)
    trainer.run = replace(run, memory_limit=limit)
    return trainer


def corrections(folder: Path) -> list[dict[str, Any]]:
    path = folder / "journal" / "events.jsonl"
    events = journal(folder, "events") if path.exists() else []
    return [event for event in events if event["event"] == "sizes corrected"]


@pytest.mark.parametrize(("kind", "budget", "tokens"), [("GRPO", MIB, 8), ("SFT", 1 << 50, 64)])
def test_a_run_is_corrected_once_after_ten_steps(kind, budget, tokens, tmp_path, caplog):
    trainer = limited(make(kind, tmp_path, micro_batch_tokens=None, max_steps=12, **SAVED), budget, 16)
    with caplog.at_level(logging.INFO, "lowpeak"):
        trainer.train()
    assert trainer.run.sizes.micro_batch_tokens == trainer.run.budget.max_tokens == tokens
    (event,) = corrections(tmp_path)
    assert (event["step"], event["micro_batch_tokens"], event["limit"]) == (10, tokens, budget)
    assert event["peaks"]["train"] == max(row["peak_memory/train"] for row in journal(tmp_path)[:10])
    (told,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("After 10 steps")]
    assert f"16 -> {tokens}" in told

    again = limited(make(kind, tmp_path, micro_batch_tokens=None, max_steps=14, **SAVED), MIB, 16)
    again.train(resume_from_checkpoint=True)
    assert again.run.sizes.micro_batch_tokens == tokens
    assert len(corrections(tmp_path)) == 1


def test_explicit_micro_batches_and_a_cpu_without_a_budget_are_not_corrected(tmp_path):
    assert not make("SFT", tmp_path).run.memory_limit.corrects
    assert not make("SFT", tmp_path, micro_batch_tokens=None).run.memory_limit.corrects

"""A memory budget on two ranks: one plan and the same sizes on both, or the same error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from setups import build, error_of, note, prepare, rank, seen

from child_processes import succeed_on_ranks
from lowpeak.arguments.base import MemorySettings
from lowpeak.sizes.memory_budget import budget_bytes

AUTO = {"micro_batch_tokens": None, "logprob_chunk_size": None, "kv_cache_bytes": None}


def train(place: Path) -> None:
    """Train with a budget."""
    trainer = build("GRPO", place / "run", {**prepare("ddp"), **AUTO, "memory_budget": 0.5, "max_steps": 1})
    own = MemorySettings(memory_budget=(1 + rank()) << 30)
    least = budget_bytes(own, torch.device("cpu"), trainer.run.strategy.ranks)
    trainer.train()
    note(place, sizes=trainer.run.sizes.as_dict(), budget=trainer.run.memory_budget, least=least)


def exceed(place: Path) -> None:
    """Ask for less than the model takes."""
    arguments: dict[str, Any] = {**prepare("ddp"), **AUTO, "memory_budget": 1 << 20}
    note(place, error=error_of(lambda: build("GRPO", place / "run", arguments)))


def test_the_budget_of_the_rank_that_has_least_counts_on_all(tmp_path):
    succeed_on_ranks(train, tmp_path)
    first, second = seen(tmp_path)
    assert first["sizes"] == second["sizes"]
    assert first["budget"] == second["budget"]
    assert first["least"] == second["least"] == 1 << 30


@pytest.mark.extended
def test_a_run_that_cannot_fit_is_the_same_error_on_all_ranks(tmp_path):
    succeed_on_ranks(exceed, tmp_path)
    first, second = (found["error"] for found in seen(tmp_path))
    assert first == second
    assert "ArgumentError: the run does not fit: phase" in first

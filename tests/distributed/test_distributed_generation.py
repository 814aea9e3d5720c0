"""A sharded model generates the same tokens at every budget, and gives back all that it changed, also when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spawn import launch

STRATEGIES = ("ddp", "fsdp2", "zero3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """What each rank of each strategy found."""
    out = tmp_path_factory.mktemp("generation")
    for strategy in STRATEGIES:
        launch("run_generation.py", [strategy, str(out)])
    return {(s, rank): json.loads(Path(out / f"{s}-{rank}.json").read_text()) for s in STRATEGIES for rank in (0, 1)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["tied", "untied", "odd"])
@pytest.mark.parametrize("kind", ["uneven", "empty"])
def test_tokens_are_the_same_at_every_budget_and_under_every_strategy(
    runs: dict[tuple[str, int], dict[str, Any]], strategy: str, model: str, kind: str
) -> None:
    for rank in (0, 1):
        expected = runs["ddp", rank][model][f"{kind}/all"]
        assert len(expected) == {("uneven", 0): 10, ("uneven", 1): 2, ("empty", 0): 4, ("empty", 1): 0}[kind, rank]
        found = runs[strategy, rank][model]
        assert {found[f"{kind}/{budget}"] == expected for budget in ("all", "some", "none")} == {True}


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_transformers_own_generate_runs_on_a_sharded_model(
    runs: dict[tuple[str, int], dict[str, Any]], strategy: str
) -> None:
    for rank in (0, 1):
        assert runs[strategy, rank]["tied"]["generate"] == runs["ddp", rank]["tied"]["generate"]


@pytest.mark.parametrize("part", ["", "model.layers.1.mlp", "model.norm", "model.rotary_emb"])
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_a_rank_that_raises_while_it_generates_ends_it_on_all_and_training_goes_on(
    runs: dict[tuple[str, int], dict[str, Any]], strategy: str, part: str
) -> None:
    assert runs[strategy, 1]["told"][part] == "ValueError: out of luck"
    assert runs[strategy, 0]["told"][part].startswith("EngineError: rank 1 failed while it generated")
    assert runs[strategy, 0]["tied"]["loss"] == pytest.approx(runs["ddp", 0]["tied"]["loss"], abs=1e-5)


@pytest.mark.parametrize("allocation", ["20", "49"])
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_where_one_rank_has_no_room_for_all_layers_all_keep_fewer_and_the_tokens_are_the_same(
    runs: dict[tuple[str, int], dict[str, Any]], strategy: str, allocation: str
) -> None:
    for rank in (0, 1):
        assert runs[strategy, rank]["without_room"][allocation] == runs[strategy, rank]["tied"]["uneven/all"]

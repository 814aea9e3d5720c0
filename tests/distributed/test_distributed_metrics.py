"""Metrics of a user's own are of the whole evaluation on every rank, also where ranks have another number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from setups import ANSWERS, PROMPTS, build, forget, note, prepare, seen

from child_processes import succeed_on_ranks
from lowpeak.journal import read_rows
from preference_data import tiny_classifier


def run_all(place: Path, strategies: list[str]) -> None:
    """What each rank's metric functions get, and two rollouts whose completions all have token values in the journal."""
    for strategy in strategies:
        found: dict[str, Any] = {}
        for kind in ("SFT", "Reward"):
            found |= evaluate(place / strategy, kind, strategy)
        (place / strategy).mkdir(exist_ok=True)
        note(place / strategy, **found)
        arguments = {**prepare(strategy), "max_steps": 2, "num_completions_with_tokens": 8, "micro_batch_tokens": 24}
        build("GRPO", place / strategy / "run", arguments).train()
        forget()


def evaluate(place: Path, kind: str, strategy: str) -> dict[str, Any]:
    """What the metric functions of supervised training, or of a reward model, get of five rows."""
    found: dict[str, Any] = {}

    def metrics(evaluation: Any) -> dict[str, float]:
        found[kind] = [evaluation.predictions.tolist(), evaluation.label_ids.tolist()]
        return {"rows": float(len(evaluation.label_ids))}

    functions: dict[str, Any] = {"compute_metrics": metrics}
    if kind == "SFT":
        functions["preprocess_logits_for_metrics"] = lambda logits, labels: logits.amax(-1)
    model = tiny_classifier() if kind == "Reward" else None
    run = build(kind, place / kind, {**prepare(strategy), "max_steps": 1, "learning_rate": 0.0}, model, **functions)
    run.train()  # a model is sharded from there on
    rows = [{"prompt": prompt, **ANSWERS[kind](prompt)} for prompt in PROMPTS[1:6]]
    found[f"{kind} rows"] = run.evaluate(Dataset.from_list(rows))["eval_rows"]
    forget()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of one process, and of two ranks under each strategy."""
    out = tmp_path_factory.mktemp("metrics")
    succeed_on_ranks(run_all, out / "one", ["ddp"], world_size=1)
    succeed_on_ranks(run_all, out / "two", ["ddp", "fsdp2"])
    return {"alone": out / "one/ddp", "ddp": out / "two/ddp", "fsdp2": out / "two/fsdp2"}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_every_rank_has_the_predictions_of_one_process(runs, strategy):
    (alone,) = seen(runs["alone"], 1)
    assert (alone["SFT rows"], alone["Reward rows"]) == (5, 4)  # a pair of equal rows is left out
    for rank in seen(runs[strategy]):
        for kind in ("SFT", "Reward"):
            for ours, expected in zip(rank[kind], alone[kind], strict=True):
                np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_token_values_that_other_ranks_computed_are_in_the_journal(runs, strategy):
    alone, ours = (list(read_rows(runs[each] / "run/journal", "tokens")) for each in ("alone", strategy))
    assert len(alone) > 4
    for row, expected in zip(ours, alone, strict=True):
        assert (row["step"], row["row"], row["pieces"]) == (expected["step"], expected["row"], expected["pieces"])
        assert row["entropy"] == pytest.approx(expected["entropy"], abs=1.1e-3)  # one in the last digit
        assert row["mismatch"] == pytest.approx(expected["mismatch"], abs=1.1e-4)

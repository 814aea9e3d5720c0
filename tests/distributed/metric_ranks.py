"""What ranks do in the test of users' own evaluation metrics: an evaluation of five rows, which two ranks share unevenly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from fault_ranks import note
from setups import ANSWERS, PROMPTS, build, forget, prepare

from preferences import tiny_classifier


def evaluate(place: Path, strategy: str) -> None:
    """What each rank's metric functions get, of supervised training and of a reward model."""
    found: dict[str, Any] = {}
    for kind in ("SFT", "Reward"):

        def metrics(evaluation: Any, kind: str = kind) -> dict[str, float]:
            found[kind] = [evaluation.predictions.tolist(), evaluation.label_ids.tolist()]
            return {"rows": float(len(evaluation.label_ids))}

        functions = {"compute_metrics": metrics}
        if kind == "SFT":
            functions["preprocess_logits_for_metrics"] = lambda logits, labels: logits.amax(-1)
        model = tiny_classifier() if kind == "Reward" else None
        run = build(kind, place / kind, {**prepare(strategy), "max_steps": 1, "learning_rate": 0.0}, model, **functions)
        run.train()  # a model is sharded from there on
        rows = [{"prompt": prompt, **ANSWERS[kind](prompt)} for prompt in PROMPTS[1:6]]
        found[f"{kind} rows"] = run.evaluate(Dataset.from_list(rows))["eval_rows"]
        forget()
    note(place, **found)

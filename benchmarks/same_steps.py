"""Does a step do the same as TRL's? `python -m benchmarks.same_steps [--quick] [--algorithm rloo] [--command] [--settings JSON]`.

Both sides train the same weights on the same fixed completions (nothing is sampled) for a few steps of AdamW with the
learning task's settings. Losses, gradient norms and weights must then agree to rounding: what is left of a difference
between learning curves is sampling. With `--command`, `lowpeak grpo` and `trl grpo` run one YAML file for a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import OURS, PEER, available_sides, print_result, ratio, versions

# Of the furthest that a weight moved. AdamW divides a gradient by its own size, so that where gradients vanish their
# rounding becomes a step; gradient norms agree much closer.
TOLERANCE = 1e-2


def main() -> None:
    request = parse(sys.argv[1:])
    steps = request["steps"]
    sides = available_sides(request.pop("quick"))
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        run_apart("benchmarks.harness.warm", {"folder": str(start), "seed": 0})
        request["start"] = str(start)
        runs = {side: train(side, request, Path(folder) / side) for side in sides}
        ends = [Path(folder) / side / str(steps) for side in sides]
        move = furthest(start, ends[-1])
        compared = compare(runs, ends, move) if PEER in sides else {}
    print_result(
        {
            "benchmark": "same_steps",
            **{name: request[name] for name in ("algorithm", "settings", "steps", "command")},
            "ours": runs[OURS],
            "peer": runs.get(PEER),
            "max_weight_move": move,
            **compared,
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """What both sides are asked to do."""
    parser = argparse.ArgumentParser(description="Compare lowpeak's optimizer steps with TRL's on fixed completions.")
    parser.add_argument("--quick", action="store_true", help="two steps in place of twelve")
    parser.add_argument("--algorithm", choices=["grpo", "rloo"], default="grpo")
    parser.add_argument("--command", action="store_true", help="one step by both commands, from one YAML file of TRL")
    parser.add_argument("--settings", type=json.loads, default={}, help='such as \'{"loss_type": "sapo"}\'')
    found = parser.parse_args(arguments)
    steps = 1 if found.command else 2 if found.quick else 12
    options = {"algorithm": found.algorithm, "settings": found.settings, "command": found.command, "quick": found.quick}
    return {**options, "steps": steps, "snapshots": (steps,), "seed": 0, "canned": True}


def train(side: str, request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Losses and gradient norms of one side's steps; its weights are left in `folder/<steps>`."""
    took = run_apart("benchmarks.harness.side", {**request, "library": side, "folder": str(folder)})
    return {"loss": took["loss"], "grad_norm": took["grad_norm"]}


def compare(runs: Mapping[str, Any], ends: Sequence[Path], move: float) -> dict[str, Any]:
    """Ours over the peer's gradient norms, and the greatest difference of the weights after the last step."""
    difference = furthest(*ends)
    norms = zip(runs[OURS]["grad_norm"], runs[PEER]["grad_norm"], strict=True)
    print(f"at the end no weight differs by more than {difference:.1e}; the furthest had moved by {move:.1e}")
    return {
        "ratio": {"grad_norm": [ratio(a, b) for a, b in norms]},
        "max_weight_difference": difference,
        "agrees": difference <= TOLERANCE * move,
    }


def furthest(one: Path, other: Path) -> float:
    """The greatest difference between two saved models' weights."""
    from safetensors.torch import load_file

    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys(), "the two models have the same weights"
    return max(float((first[name] - second[name]).abs().max()) for name in first)


if __name__ == "__main__":
    main()

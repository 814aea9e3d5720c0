"""Does a step do the same as TRL's? `python -m benchmarks.same_steps [--quick] [--algorithm rloo] [--settings JSON]`.

Both sides train the same weights on the same fixed completions (nothing is sampled) for a few steps of AdamW with the
learning task's settings. Losses, gradient norms and weights must then agree to rounding: what is left of a difference
between learning curves is sampling.
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
from benchmarks.harness.report import OURS, PEER, SIDES, print_result, ratio, require_peer, versions

# Of the furthest that a weight moved. AdamW divides a gradient by its own size, so that where gradients vanish their
# rounding becomes a step; gradient norms agree much closer.
TOLERANCE = 1e-2


def main() -> None:
    algorithm, steps, settings = parse(sys.argv[1:])
    require_peer()
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        run_apart("benchmarks.harness.warm", {"folder": str(start), "seed": 0})
        runs = {side: train(side, algorithm, steps, settings, start, Path(folder) / side) for side in SIDES}
        ends = [Path(folder) / side / str(steps) for side in SIDES]
        difference, move = furthest(*ends), furthest(start, ends[1])
    ours, peer = runs[OURS], runs[PEER]
    ratios = [ratio(a, b) for a, b in zip(ours["grad_norm"], peer["grad_norm"], strict=True)]
    agrees = difference <= TOLERANCE * move
    print(f"after {steps} steps no weight differs by more than {difference:.1e}; the furthest had moved by {move:.1e}")
    print_result(
        {
            "benchmark": "same_steps",
            "algorithm": algorithm,
            "settings": settings,
            "steps": steps,
            "ours": ours,
            "peer": peer,
            "ratio": {"grad_norm": ratios},
            "max_weight_difference": difference,
            "max_weight_move": move,
            "agrees": agrees,
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> tuple[str, int, dict[str, Any]]:
    """The algorithm, the number of steps, and settings beside the learning task's."""
    parser = argparse.ArgumentParser(description="Compare lowpeak's optimizer steps with TRL's on fixed completions.")
    parser.add_argument("--quick", action="store_true", help="four steps in place of twelve")
    parser.add_argument("--algorithm", choices=["grpo", "rloo"], default="grpo")
    parser.add_argument("--settings", type=json.loads, default={}, help='such as \'{"loss_type": "sapo"}\'')
    found = parser.parse_args(arguments)
    return found.algorithm, 4 if found.quick else 12, found.settings


def train(
    side: str, algorithm: str, steps: int, settings: Mapping[str, Any], start: Path, folder: Path
) -> dict[str, Any]:
    """Losses and gradient norms of one side's steps; its weights are left in `folder/<steps>`."""
    request: Mapping[str, Any] = {
        "library": side,
        "algorithm": algorithm,
        "seed": 0,
        "steps": steps,
        "start": str(start),
        "folder": str(folder),
        "snapshots": (steps,),
        "canned": True,
        "settings": settings,
    }
    took = run_apart("benchmarks.harness.side", request)
    return {"loss": took["loss"], "grad_norm": took["grad_norm"]}


def furthest(one: Path, other: Path) -> float:
    """The greatest difference between two saved models' weights."""
    from safetensors.torch import load_file

    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys(), "the two models have the same weights"
    return max(float((first[name] - second[name]).abs().max()) for name in first)


if __name__ == "__main__":
    main()

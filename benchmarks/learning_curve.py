"""The same reward curve as TRL's? `python -m benchmarks.learning_curve [--quick] [--algorithm rloo]`.

For each seed: one warm-started model is saved, lowpeak and TRL train it in fresh processes with the same data and
settings, and one evaluation measures both sides' snapshots on the same held-out prompts. Ours agrees at a step when our
seeds' mean lies within two standard deviations of TRL's seeds around their mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import OURS, PEER, SIDES, available_sides, deviation, mean, print_result, ratio, versions

JUDGED_STEPS = (60, 100, 160)


@dataclass(frozen=True)
class Plan:
    """What is run: `every` is the distance between snapshots in steps."""

    algorithm: str
    seeds: tuple[int, ...]
    steps: int = 160
    every: int = 10
    held_out: int = 1024
    quick: bool = False

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The steps after which the model is measured, 0 aside."""
        return tuple(range(self.every, self.steps + 1, self.every))

    @property
    def judged(self) -> tuple[int, ...]:
        """The steps at which the sides are compared: the settled ones, or the last of a run that is too short."""
        return tuple(step for step in JUDGED_STEPS if step <= self.steps) or (self.steps,)


def main() -> None:
    plan, save = parse(sys.argv[1:])
    sides = available_sides(plan.quick)
    with tempfile.TemporaryDirectory() as folder:
        runs = [run_seed(plan, sides, seed, Path(folder)) for seed in plan.seeds]
    result = summarize(plan, runs)
    show(plan, result)
    if save is not None:
        save.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print_result(result)


def parse(arguments: Sequence[str]) -> tuple[Plan, Path | None]:
    """What to run, and the file that the result is also written to."""
    parser = argparse.ArgumentParser(description="Compare lowpeak's learning curve with TRL's.")
    parser.add_argument("--quick", action="store_true", help="one seed, ten steps: whether it runs at all")
    parser.add_argument("--algorithm", choices=["grpo", "rloo"], default="grpo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--save", type=Path, help="write the result into this file as well (for plot_curve)")
    found = parser.parse_args(arguments)
    if found.quick:
        return Plan(found.algorithm, (found.seeds[0],), steps=10, every=10, held_out=32, quick=True), found.save
    return Plan(found.algorithm, tuple(found.seeds)), found.save


def run_seed(plan: Plan, sides: Sequence[str], seed: int, folder: Path) -> dict[str, dict[str, Any]]:
    """The sides of one seed, each in a process of its own: what each took, and its accuracies by step."""
    start = folder / f"start-{seed}"
    run_apart("benchmarks.harness.warm", {"folder": str(start), "seed": seed})
    took = {side: train(plan, side, seed, start, folder / f"{side}-{seed}") for side in sides}
    snapshots = {
        f"{side} {step}": str(folder / f"{side}-{seed}" / str(step)) for side in sides for step in plan.snapshots
    }
    measuring = {"tokenizer": str(start), "held_out": plan.held_out, "snapshots": {"start": str(start)} | snapshots}
    found = run_apart("benchmarks.harness.accuracy", measuring)
    for side in sides:
        took[side]["accuracy"] = {"0": found["start"]} | {str(step): found[f"{side} {step}"] for step in plan.snapshots}
    return took


def train(plan: Plan, side: str, seed: int, start: Path, folder: Path) -> dict[str, Any]:
    """One side's training: CPU seconds and memory."""
    request = {
        "library": side,
        "algorithm": plan.algorithm,
        "seed": seed,
        "steps": plan.steps,
        "start": str(start),
        "folder": str(folder),
        "snapshots": plan.snapshots,
    }
    took = run_apart("benchmarks.harness.side", request)
    print(f"{plan.algorithm} seed {seed} {side}: {took['cpu_seconds']:.1f} CPU-seconds", file=sys.stderr, flush=True)
    return {"seed": seed, **took}


def summarize(plan: Plan, runs: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, Any]:
    """Each side's seeds, the comparison at the judged steps, and ours over the peer's in time and memory."""
    sides = {side: [run[side] for run in runs] for side in runs[0]}
    result = {"benchmark": "learning_curve", **asdict(plan), "ours": sides[OURS], "versions": versions()}
    if PEER not in sides:
        return result
    comparison = {str(step): compare(sides, step) for step in plan.judged}
    return {
        **result,
        "peer": sides[PEER],
        "comparison": comparison,
        "agrees": all(at["within"] for at in comparison.values()) if len(plan.seeds) > 1 else None,
        "ratio": {
            name: ratio(mean([r[name] for r in sides[OURS]]), mean([r[name] for r in sides[PEER]]))
            for name in ("cpu_seconds", "peak_rss_mb")
            if all(r[name] is not None for side in SIDES for r in sides[side])
        },
    }


def compare(sides: Mapping[str, Sequence[Mapping[str, Any]]], step: int) -> dict[str, Any]:
    """Sampled accuracy at one step: means, the peer's deviation, and our distance from the peer's mean in deviations.

    A single seed has no deviation: nothing is judged by it.
    """
    ours, peer = ([run["accuracy"][str(step)]["sampled"] for run in sides[side]] for side in SIDES)
    distance, spread = mean(ours) - mean(peer), deviation(peer)
    return {
        "ours": round(mean(ours), 4),
        "peer": round(mean(peer), 4),
        "peer_deviation": round(spread, 4),
        "distance_in_deviations": round(distance / spread, 2) if spread else None,
        "within": abs(distance) <= 2 * spread if len(peer) > 1 else None,
    }


def show(plan: Plan, result: Mapping[str, Any]) -> None:
    """The seeds as a table: greedy / sampled accuracy at the start and the judged steps, CPU-seconds, memory."""
    steps = ["0", *map(str, plan.judged)]
    print("| run | " + " | ".join(f"step {step}" for step in steps) + " | CPU-seconds | peak MB (training adds) |")
    print("|---" * (len(steps) + 3) + "|")
    for name, side in (("TRL", "peer"), ("lowpeak", "ours")):
        for run in result.get(side, ()):
            cells = [f"{a['greedy']:.2f} / {a['sampled']:.2f}" for a in (run["accuracy"][step] for step in steps)]
            label = f"{name} {plan.algorithm.upper()} seed {run['seed']}"
            print(f"| {label} | {' | '.join(cells)} | {run['cpu_seconds']:.1f} | {memory(run)} |")


def memory(run: Mapping[str, Any]) -> str:
    """Peak resident memory and what training added to it; a dash where it cannot be read."""
    peak, start = run["peak_rss_mb"], run["start_rss_mb"]
    return "-" if peak is None or start is None else f"{peak:.0f} ({peak - start:.0f})"


if __name__ == "__main__":
    main()

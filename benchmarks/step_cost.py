"""What a step of the learning task costs, by phase, beside TRL's: `python -m benchmarks.step_cost [--quick]`.

CPU seconds of the process, one thread, after warm-up steps that are not counted apart: rollout (generation), reward,
train (forward and backward), and the rest (optimizer, advantages, logs, the loop). lowpeak's journal measures the same
phases by the clock on the wall; `journal_seconds` are its numbers, which other work on the machine makes longer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import OURS, PEER, SIDES, mean, print_result, ratio, require_peer, versions

PHASES = ("rollout", "reward", "train", "rest")


def main() -> None:
    algorithm, steps, rounds = parse(sys.argv[1:])
    require_peer()
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(algorithm, steps, rounds, Path(folder))
    ours, peer = (per_step(runs[side], steps) for side in SIDES)
    ratios = {phase: ratio(ours[phase], peer[phase]) for phase in (*PHASES, "total")}
    show(ours, peer, ratios)
    print_result(
        {
            "benchmark": "step_cost",
            "algorithm": algorithm,
            "steps": steps,
            "rounds": rounds,
            "unit": "CPU seconds a step",
            "ours": ours,
            "peer": peer,
            "ratio": ratios,
            "journal_seconds": journal_seconds(runs[OURS]),
            "idle_share": {"ours": idle_share(runs[OURS]), "peer": idle_share(runs[PEER])},
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> tuple[str, int, int]:
    """The algorithm, steps of a run, and how often the two sides take turns."""
    parser = argparse.ArgumentParser(description="CPU seconds of a step by phase, lowpeak's beside TRL's.")
    parser.add_argument("--quick", action="store_true", help="ten steps, one round")
    parser.add_argument("--algorithm", choices=["grpo", "rloo"], default="grpo")
    found = parser.parse_args(arguments)
    return (found.algorithm, 10, 1) if found.quick else (found.algorithm, 60, 3)


def measure(algorithm: str, steps: int, rounds: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each side took in each round: they take turns, each time in a fresh process and from the same weights."""
    start = folder / "start"
    run_apart("benchmarks.harness.warm", {"folder": str(start), "seed": 0})
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES:
            request = {
                "library": side,
                "algorithm": algorithm,
                "seed": 0,
                "steps": steps,
                "start": str(start),
                "folder": str(folder / f"{side}-{number}"),
                "phases": True,
            }
            runs[side].append(run_apart("benchmarks.harness.side", request))
    return runs


def per_step(runs: Sequence[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """CPU seconds a step by phase, means over rounds; `rest` is what no phase took."""
    phases = {p: mean([run["cpu_seconds_by_phase"].get(p, 0.0) for run in runs]) / steps for p in PHASES[:-1]}
    total = mean([run["cpu_seconds"] for run in runs]) / steps
    phases |= {"rest": total - sum(phases.values()), "total": total}
    return {name: round(seconds, 4) for name, seconds in phases.items()}


def journal_seconds(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The journal's wall-clock seconds a step by its own phases, means over rounds."""
    names = runs[0]["journal_seconds"]
    return {name: round(mean([run["journal_seconds"][name] for run in runs]), 4) for name in names}


def idle_share(runs: Sequence[Mapping[str, Any]]) -> float:
    """The share of rows in groups whose rewards are all equal, which have no gradient and need no training."""
    return round(mean([run["frac_reward_zero_std"] for run in runs]), 3)


def show(ours: Mapping[str, float], peer: Mapping[str, float], ratios: Mapping[str, float | None]) -> None:
    """One line per phase."""
    print("| CPU seconds a step | lowpeak | TRL | ratio |\n|---|---|---|---|")
    for phase in (*PHASES, "total"):
        print(f"| {phase} | {ours[phase]:.3f} | {peer[phase]:.3f} | {ratios[phase]} |")


if __name__ == "__main__":
    main()

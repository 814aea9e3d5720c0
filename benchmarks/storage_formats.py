"""Which storage formats learn: `python -m benchmarks.storage_formats [--algorithms ...] [--rates ...] [--quick]`.

The learning task in fp32, with bf16 weights of 32, 24 and 16 bits and 8-bit states, and by TRL with its bf16 weights. All
runs of a seed start from the same weights and train in fresh processes of one thread; `--jobs` of them run at a time.
One evaluation in fp32 measures each run's last weights on the same held-out prompts. TRL trains GRPO and RLOO.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import OURS, PEER, available_sides, deviation, mean, print_result, versions

BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": (OURS, {}),
    "32 bits, 8-bit states": (OURS, BF16),
    "24 bits, 8-bit states": (OURS, {"weight_bits": 24}),
    "16 bits, 8-bit states": (OURS, {"weight_bits": 16}),
    "TRL, bf16": (PEER, BF16),
}
PEERS_ALGORITHMS = ("grpo", "rloo")
EVERY = 40  # steps between snapshots
QUICK = ("fp32", "16 bits, 8-bit states", "TRL, bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "rloo", "ppo"])
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-4, 5e-5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--held_out", type=int, default=1024)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--save", type=Path, help="write the result into this file as well")
    parser.add_argument("--quick", action="store_true", help="GRPO, one rate and seed, two formats, ten steps")
    plan = parser.parse_args()
    if plan.quick:
        plan.algorithms, plan.rates, plan.seeds, plan.steps, plan.held_out = ["grpo"], [5e-4], [0], 10, 32
    sides, names = available_sides(plan.quick), QUICK if plan.quick else tuple(FORMATS)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(plan.jobs) as pool:
        starts = {seed: Path(folder) / f"start-{seed}" for seed in plan.seeds}
        list(
            pool.map(
                lambda seed: run_apart("benchmarks.harness.warm", {"folder": str(starts[seed]), "seed": seed}), starts
            )
        )
        cases = [
            (algorithm, rate, name, seed)
            for algorithm in plan.algorithms
            for rate in plan.rates
            for name in names
            if FORMATS[name][0] == OURS or (PEER in sides and algorithm in PEERS_ALGORITHMS)
            for seed in plan.seeds
        ]
        result: dict[str, Any] = {"benchmark": "storage_formats", "steps": plan.steps, "versions": versions()}
        result["runs"] = []
        for run in pool.map(lambda case: train(plan, case, starts[case[3]], Path(folder)), cases):
            result["runs"].append(run)
            if plan.save is not None:  # after each run: all of them take an hour
                plan.save.write_text(json.dumps(result) + "\n", encoding="utf-8")
    show(result["runs"])
    print_result(result)


def train(plan: argparse.Namespace, case: tuple[str, float, str, int], start: Path, folder: Path) -> dict[str, Any]:
    """One run: its accuracy by step, CPU seconds and memory."""
    algorithm, rate, name, seed = case
    library, settings = FORMATS[name]
    target = folder / f"{algorithm}-{rate:g}-{name}-{seed}"
    steps = tuple(range(EVERY, plan.steps + 1, EVERY)) or (plan.steps,)
    request = {
        "library": library, "algorithm": algorithm, "seed": seed, "steps": plan.steps, "start": str(start),
        "folder": str(target), "snapshots": steps, "settings": {**settings, "learning_rate": rate},
    }  # fmt: skip
    took = run_apart("benchmarks.harness.side", request)
    snapshots = {str(step): str(target / str(step)) for step in steps}
    measuring = {"tokenizer": str(start), "held_out": plan.held_out, "snapshots": {"0": str(start), **snapshots}}
    found = run_apart("benchmarks.harness.accuracy", measuring)
    accuracy = {step: found[step] for step in ("0", *snapshots)}
    print(
        f"{algorithm} {rate:g} {name} seed {seed}: {accuracy[str(plan.steps)]['sampled']:.3f}",
        file=sys.stderr,
        flush=True,
    )
    of_run = {name: took[name] for name in ("cpu_seconds", "peak_rss_mb", "start_rss_mb")}
    return {"algorithm": algorithm, "rate": rate, "format": name, "seed": seed, "accuracy": accuracy, **of_run}


def show(runs: Sequence[dict[str, Any]]) -> None:
    """Sampled accuracy at the end by seed, its mean, and the mean's distance from fp32's in fp32's deviations."""
    print("| algorithm, learning rate | format | sampled accuracy by seed | mean | from fp32's, in its deviations |")
    print("|---|---|---|---|---|")
    groups: dict[tuple[str, float, str], list[float]] = {}
    for run in runs:
        last = run["accuracy"][max(run["accuracy"], key=int)]["sampled"]
        groups.setdefault((run["algorithm"], run["rate"], run["format"]), []).append(last)
    for (algorithm, rate, name), values in groups.items():
        exact = groups[algorithm, rate, "fp32"]
        spread = deviation(exact) if len(exact) > 1 else 0.0
        distance = f"{(mean(values) - mean(exact)) / spread:+.1f}" if spread else "-"
        by_seed = " ".join(f"{value:.2f}" for value in values)
        print(f"| {algorithm}, {rate:g} | {name} | {by_seed} | {mean(values):.3f} | {distance} |")


if __name__ == "__main__":
    main()

"""Do PPO and Online DPO learn the learning task, whoever judges it? `python -m benchmarks.learning ppo|online-dpo [--quick]`.

For each seed one warm-started model is saved, and trained by the reward (1 for the exact answer) and by another's word, each in a
fresh process: Online DPO by the judge of examples/noisy_sort_judge.py (digits in their place), PPO by a reward model that was
trained on preferences before. One evaluation measures all on the same held-out prompts. There is no peer: TRL 1.16 has neither
PPO nor a judge, and its pairs are the first two completions alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import OURS, print_result, versions

WAYS = {"ppo": ("reward", "reward model"), "online-dpo": ("reward", "judge")}
# By a reward model, which can be fooled: the policy is held to its start, and the critic begins as the reward model.
_BY_MODEL = {
    "learning_rate": 3e-4,
    "value_learning_rate": 5e-4,
    "beta": 0.2,
    "critic": "model",
    "value_warmup_steps": 10,
}


@dataclass(frozen=True)
class Plan:
    """What is run, and after which steps it is measured."""

    algorithm: str
    seeds: tuple[int, ...]
    steps: int = 160
    measured: tuple[int, ...] = (60, 100, 160)
    held_out: int = 1024
    judge_steps: int = 1000


def main() -> None:
    plan = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        runs = [run for seed in plan.seeds for run in run_seed(plan, seed, Path(folder))]
    show(plan, runs)
    print_result({"benchmark": "learning", **asdict(plan), "runs": runs, "versions": versions()})


def parse(arguments: Sequence[str]) -> Plan:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description="An algorithm's accuracy on the learning task, by a reward and by another's word."
    )
    parser.add_argument("algorithm", choices=WAYS)
    parser.add_argument("--quick", action="store_true", help="one seed, a dozen steps: whether it runs at all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    found = parser.parse_args(arguments)
    if found.quick:
        return Plan(found.algorithm, (found.seeds[0],), 12, (12,), 256, 20)
    return Plan(found.algorithm, tuple(found.seeds))


def run_seed(plan: Plan, seed: int, folder: Path) -> list[dict[str, Any]]:
    """One seed's two runs, with their accuracies by step."""
    start = folder / f"start-{seed}"
    run_apart("benchmarks.harness.warm", {"folder": str(start), "seed": seed, "judge_steps": judge_steps(plan)})
    ways = WAYS[plan.algorithm]
    runs = [{"seed": seed, "by": way, **train(plan, way, seed, start, folder / f"{way}-{seed}")} for way in ways]
    snapshots = {f"{way} {step}": str(folder / f"{way}-{seed}" / str(step)) for way in ways for step in plan.measured}
    measuring = {"tokenizer": str(start), "held_out": plan.held_out, "snapshots": {"start": str(start)} | snapshots}
    found = run_apart("benchmarks.harness.accuracy", measuring)
    for run in runs:
        run["accuracy"] = {"0": found["start"]} | {str(step): found[f"{run['by']} {step}"] for step in plan.measured}
    return runs


def judge_steps(plan: Plan) -> int:
    """Steps that a reward model is trained for; 0 where none judges."""
    return plan.judge_steps if "reward model" in WAYS[plan.algorithm] else 0


def train(plan: Plan, way: str, seed: int, start: Path, folder: Path) -> dict[str, Any]:
    """One run: CPU seconds and memory."""
    request = {
        "library": OURS,
        "algorithm": plan.algorithm,
        "judge": {"judge": "judge", "reward model": str(start / "judge")}.get(way, ""),
        "arguments": {**_BY_MODEL, "value_model_path": str(start / "judge")} if way == "reward model" else {},
        "seed": seed,
        "steps": plan.steps,
        "start": str(start),
        "folder": str(folder),
        "snapshots": plan.measured,
    }
    took = run_apart("benchmarks.harness.side", request)
    print(f"seed {seed} by {way}: {took['cpu_seconds']:.1f} CPU-seconds", file=sys.stderr, flush=True)
    return {name: took[name] for name in ("cpu_seconds", "peak_rss_mb", "frac_reward_zero_std")}


def show(plan: Plan, runs: Sequence[Mapping[str, Any]]) -> None:
    """Greedy / sampled accuracy at the start and at the measured steps, and CPU-seconds."""
    steps = ["0", *map(str, plan.measured)]
    print("| run | " + " | ".join(f"step {step}" for step in steps) + " | CPU-seconds |")
    print("|---" * (len(steps) + 2) + "|")
    for run in runs:
        cells = [f"{a['greedy']:.2f} / {a['sampled']:.2f}" for a in (run["accuracy"][step] for step in steps)]
        print(
            f"| {plan.algorithm} by {run['by']}, seed {run['seed']} | {' | '.join(cells)} | {run['cpu_seconds']:.1f} |"
        )


if __name__ == "__main__":
    main()

"""What PPO's critic costs by its layout, beside GRPO without one: `python -m benchmarks.critic_layouts [--quick]`.

W2 of step_table.py (a Qwen2 shape of 103M parameters, 78M of them the tied embedding; groups of 8 completions of
exponential lengths up to 256, which are canned). Full fine-tuning: a value head, a critic with a backbone of its own. Under
LoRA (r = 16 on every linear layer): a value head, a second adapter, a backbone of its own. fp32, activation checkpointing;
each rollout serves one step and there is no reference, so that a step is as much work for GRPO but for PPO's scoring of
old log-probs and values. Fresh processes take turns. Medians over steps, after a first one that is not counted, and over
rounds; ratios to GRPO's with the same tuning.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import print_result, ratio, versions
from benchmarks.harness.shapes import NUM_GENERATIONS, draw_lengths

# name: (the critic's layout, None for GRPO; whether the policy is under LoRA)
LAYOUTS: dict[str, tuple[str | None, bool]] = {
    "GRPO": (None, False),
    "PPO, head": ("head", False),
    "PPO, model": ("model", False),
    "GRPO, LoRA": (None, True),
    "PPO, head, LoRA": ("head", True),
    "PPO, adapter, LoRA": ("adapter", True),
    "PPO, model, LoRA": ("model", True),
}
PHASES = ("score", "train", "optimizer")
QUICK = ("GRPO, LoRA", "PPO, adapter, LoRA")
Runs = dict[str, list[dict[str, Any]]]  # by layout, one for each round


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    num_prompts: int
    prompt_length: int
    steps: int
    rounds: int
    threads: int
    quick: bool
    options: Mapping[str, Any] = field(default_factory=dict)


def main() -> None:
    plan = parse(sys.argv[1:])
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # without it freed blocks stay resident, and look like a peak
    began = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(plan, Path(folder))
    rows = {name: summary(found) for name, found in runs.items()}
    show(rows)
    print_result(
        {
            "benchmark": "critic_layouts",
            **asdict(plan),
            "unit": "seconds a step; MB",
            "layouts": rows,
            "load": [began, os.getloadavg()],
            "runs": runs,
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> Plan:
    """What the command line asks for; a quick run is two layouts of a small model."""
    parser = argparse.ArgumentParser(description="Memory and seconds of a step of PPO by its critic's layout.")
    parser.add_argument("--prompts", type=int, default=2, help="prompts a step, of 8 completions each")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=3, help="steps of a run, the first of which is not counted")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each layout")
    parser.add_argument("--threads", type=int, default=1, help="computing threads of a run")
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of the trainers (JSON)")
    parser.add_argument("--quick", action="store_true", help="two steps of one prompt, two layouts of a small model")
    found = parser.parse_args(arguments)
    if found.quick:
        found.prompts, found.steps, found.rounds = 1, 2, 1
    return Plan(found.prompts, found.prompt, found.steps, found.rounds, found.threads, found.quick, found.options)


def measure(plan: Plan, folder: Path) -> Runs:
    """What each layout took in each round, each time in a fresh process and from the same weights."""
    start = folder / "start"
    run_apart("benchmarks.harness.shapes", {"folder": str(start), "quick": plan.quick})
    runs: Runs = {name: [] for name in (QUICK if plan.quick else LAYOUTS)}
    for number in range(plan.rounds):
        for name in runs:
            found = run_apart("benchmarks.harness.critics", request_of(plan, name, number, start, folder))
            runs[name].append(found)
            print(f"{name}, round {number}: {found['steps']}", file=sys.stderr, flush=True)
    return runs


def request_of(plan: Plan, name: str, number: int, start: Path, folder: Path) -> dict[str, Any]:
    """One run's request: see critics.CriticRequest; lengths are those of the round, whatever the layout."""
    critic, lora = LAYOUTS[name]
    rows = plan.num_prompts * NUM_GENERATIONS
    return {
        "critic": critic,
        "lora": lora,
        "num_prompts": plan.num_prompts,
        "prompt_length": plan.prompt_length,
        "steps": plan.steps,
        "threads": plan.threads,
        "start": str(start),
        "folder": str(folder / f"{critic}-{lora}-{number}"),
        "lengths": [draw_lengths(rows, 1000 * number + step) for step in range(plan.steps)],
        "options": dict(plan.options),
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the counted steps of all rounds, and the highest peaks; peaks by phase are above the empty process."""
    steps = [step for run in runs for step in run["steps"][1:]]
    phases = runs[0]["peak_rss_mb_by_phase"]
    return {
        "cpu_seconds": {name: median([step.get(name, 0.0) for step in steps]) for name in (*PHASES, "total")},
        "wall_seconds": median([seconds for run in runs for seconds in run["wall"][1:]]),
        "loaded_mb": median([run["start_rss_mb"] - run["empty_rss_mb"] for run in runs]),
        "peak_mb": max(run["peak_rss_mb"] - run["empty_rss_mb"] for run in runs),
        "peak_mb_by_phase": {
            name: round(max(run["peak_rss_mb_by_phase"].get(name, 0.0) - run["empty_rss_mb"] for run in runs), 1)
            for name in phases
        },
        "trained": runs[0]["trained"],
        "parameters": runs[0]["parameters"],
        "loss": runs[0]["loss"],
    }


def median(values: Sequence[float]) -> float:
    """The median, to three digits."""
    return round(statistics.median(values), 3)


def base_of(name: str) -> str:
    """The row that a layout is compared with."""
    return "GRPO, LoRA" if LAYOUTS[name][1] else "GRPO"


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """One line a layout."""
    print(
        "| | trained, M | loaded, MB | peak, MB | of GRPO's | score, s | train, s | optimizer, s | step, CPU s | of GRPO's | "
        "step, s |"
    )
    print("|---" * 11 + "|")
    for name, row in rows.items():
        base, seconds = rows[base_of(name)], row["cpu_seconds"]
        phases = " | ".join(f"{seconds[phase]:.2f}" for phase in PHASES)
        print(
            f"| {name} | {row['trained'] / 1e6:.2f} | {row['loaded_mb']:.0f} | {row['peak_mb']:.0f} | "
            f"{ratio(row['peak_mb'], base['peak_mb'])} | {phases} | {seconds['total']:.2f} | "
            f"{ratio(seconds['total'], base['cpu_seconds']['total'])} | {row['wall_seconds']:.2f} |"
        )


if __name__ == "__main__":
    main()

"""What a step of Online DPO costs beside TRL's: `python -m benchmarks.online_dpo [--kind canned|whole] [--quick]`.

W2 of step_table.py (a Qwen2 shape of 103M parameters, 78M of them the tied embedding), two completions of each prompt, of
exponential lengths up to 256. `whole` generates, with the same lengths on both sides; `canned` puts fixed completions in the
place of generation. The same rows are trained on both sides, fp32, with activation checkpointing, in fresh processes of
one thread that take turns. Medians over steps, after a first one that is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.pairing import PAIR
from benchmarks.harness.process import run_apart
from benchmarks.harness.report import OURS, PEER, available_sides, print_result, ratio, versions
from benchmarks.harness.shapes import draw_lengths
from benchmarks.step_table import PHASES, median_seconds

AIM = 0.5  # of the peer's peak, and of its time


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    canned: bool
    prompt_length: int
    num_prompts: int
    prompts_at_once: int
    steps: int
    rounds: int
    quick: bool
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def main() -> None:
    plan = parse(sys.argv[1:])
    sides = available_sides(plan.quick)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # without it freed blocks stay resident, and look like a peak
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(plan, Path(folder), sides)
    ours, peer = summary(runs[OURS]), summary(runs[PEER]) if PEER in sides else None
    ratios = {} if peer is None else compare(ours, peer)
    if peer is not None:
        show(ours, peer, ratios)
    print_result(
        {
            "benchmark": "online_dpo",
            **asdict(plan),
            "unit": "CPU seconds a step; MB",
            "ours": ours,
            "peer": peer,
            "ratio": ratios,
            "aim": {name: at is not None and at <= AIM for name, at in ratios.items() if name in ("total", "peak_mb")},
            "runs": runs,
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> Plan:
    """What the command line asks for; a quick run is two steps of two prompts, of a narrow layer."""
    parser = argparse.ArgumentParser(
        description="CPU seconds and memory of a step of Online DPO, lowpeak's beside TRL's."
    )
    parser.add_argument("--kind", choices=["canned", "whole"], default="whole")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step")
    parser.add_argument(
        "--at_once", type=int, default=4, help="prompts that the peer takes at once, of those of a step"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of a run, the first of which is not counted")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side")
    parser.add_argument("--ours", type=json.loads, default={}, help="more arguments of our trainer")
    parser.add_argument("--peer", type=json.loads, default={}, help="more arguments of the peer's trainer")
    parser.add_argument("--quick", action="store_true", help="two steps of two prompts, of a narrow layer")
    found = parser.parse_args(arguments)
    if found.quick:
        found.prompts, found.at_once, found.steps, found.rounds = 2, 2, 2, 1
    if found.prompts % found.at_once:
        parser.error(f"--at_once {found.at_once} does not divide --prompts {found.prompts}")
    options = {OURS: found.ours, PEER: found.peer}
    sizes = (found.prompt, found.prompts, found.at_once, found.steps, found.rounds)
    return Plan(found.kind == "canned", *sizes, found.quick, options)


def measure(plan: Plan, folder: Path, sides: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """What each side took in each round: ours first, since it draws the lengths of what is generated."""
    start = folder / "start"
    run_apart("benchmarks.harness.shapes", {"folder": str(start), "quick": plan.quick})
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(plan.rounds):
        lengths = [draw_lengths(plan.num_prompts * PAIR, 1000 * number + step) for step in range(plan.steps)]
        for side in sides:
            found = run_apart(
                "benchmarks.harness.pairing", request_of(plan, side, lengths, start, folder / f"{side}-{number}")
            )
            if side == OURS:
                lengths = found["lengths"]
            runs[side].append(found)
            print(f"{side}, round {number}: {found['steps']}", file=sys.stderr, flush=True)
    return runs


def request_of(plan: Plan, side: str, lengths: list[list[int]], start: Path, folder: Path) -> dict[str, Any]:
    """One side's request: see pairing.PairRequest."""
    return {
        "library": side,
        "canned": plan.canned,
        "num_prompts": plan.num_prompts,
        "prompts_at_once": plan.prompts_at_once,
        "prompt_length": plan.prompt_length,
        "steps": plan.steps,
        "start": str(start),
        "folder": str(folder),
        "lengths": lengths,
        "options": dict(plan.options[side]),
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of a side's seconds, and its peaks."""
    return {
        "seconds": median_seconds([step for run in runs for step in run["steps"][1:]]),
        "peak_mb": max(run["peak_rss_mb"] for run in runs),
        "peak_mb_above_start": max(run["peak_rss_mb"] - run["start_rss_mb"] for run in runs),
        "loss": runs[0]["loss"],
        "grad_norm": runs[0]["grad_norm"],
        "tokens": runs[0]["tokens"],
    }


def compare(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> dict[str, float | None]:
    """Ours over the peer's: seconds of each phase, and peaks."""
    found = {name: ratio(ours["seconds"][name], peer["seconds"][name]) for name in ours["seconds"]}
    return found | {name: ratio(ours[name], peer[name]) for name in ("peak_mb_above_start", "peak_mb")}


def show(ours: Mapping[str, Any], peer: Mapping[str, Any], ratios: Mapping[str, float | None]) -> None:
    """One line per phase, then memory."""
    print("| | lowpeak | TRL | ratio |")
    print("|---|---|---|---|")
    for name in (*PHASES, "total"):
        print(f"| {name}, s | {ours['seconds'][name]:.3f} | {peer['seconds'][name]:.3f} | {ratios[name]} |")
    for name, words in (("peak_mb_above_start", "peak above the loaded model, MB"), ("peak_mb", "peak, MB")):
        print(f"| {words} | {ours[name]:.0f} | {peer[name]:.0f} | {ratios[name]} |")


if __name__ == "__main__":
    main()

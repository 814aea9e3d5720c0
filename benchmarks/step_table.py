"""What a step costs beside TRL's: `python -m benchmarks.step_table [--shape w1|w2] [--prompt N] [--beta B] [--quick]`.

CPU seconds and peak memory of each phase, medians over steps and rounds, after a first step that is not counted. W1 is
the learning task (32 prompts x 8); W2 a Qwen2 shape of 103M parameters, 78M of them the tied embedding, with groups of 8
and completions of exponential lengths up to 256. `--kind canned` puts fixed completions in the place of generation, so
that both sides train the same rows; `--kind whole` generates, W2 with the same lengths on both sides. All rows have
advantages. Fresh processes with one thread take turns; each side has its defaults unless `--ours` or `--peer` (JSON)
says otherwise, both have activation checkpointing on W2, and none on W1. Useful work is each prompt and each completion
token once; what a phase reaches of the machine's peak is told against a matrix product measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.flops import gflops_per_second, useful_tokens
from benchmarks.harness.process import run_apart
from benchmarks.harness.report import OURS, PEER, available_sides, print_result, ratio, versions
from benchmarks.harness.shapes import NUM_GENERATIONS, draw_lengths

PHASES = ("rollout", "score", "train", "rest")  # rest: rewards, advantages, optimizer, logs, the loop
W1_PROMPTS, W1_PROMPT_LENGTH = 32, 7
PEAKS = {
    "peak_mb_above_start": "peak above the loaded model, MB",
    "peak_mb_above_empty": "peak above the process before it loaded the model, MB",
    "peak_mb": "peak, MB",
}
Runs = dict[str, list[dict[str, Any]]]  # by side, one for each round


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    shape: str
    canned: bool
    prompt_length: int
    beta: float
    num_prompts: int
    steps: int
    rounds: int
    quick: bool
    options: Mapping[str, Mapping[str, Any]]


def main() -> None:
    plan = parse(sys.argv[1:])
    sides = available_sides(plan.quick)
    # Without it glibc keeps freed blocks of tens of MB resident, and they look like somebody's peak.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    with tempfile.TemporaryDirectory() as folder:
        peak = run_apart("benchmarks.harness.arithmetic", {"dtypes": ["float32"], "size": 512 if plan.quick else 3072})
        runs = measure(plan, Path(folder), sides)
    found = {side: summary(plan, runs[side], peak["float32"]) for side in sides}
    ours, peer = found[OURS], found.get(PEER)
    if peer is not None:
        show(ours, peer)
    print_result(
        {
            "benchmark": "step_table",
            **{name: getattr(plan, name) for name in Plan.__dataclass_fields__},
            "unit": "CPU seconds a step; MB",
            "ours": ours,
            "peer": peer,
            "ratio": compare(ours, peer) if peer is not None else None,
            "gflops_peak": peak["float32"],
            "makes_up_our_peak": parts_of_peak(runs[OURS][-1]),
            "runs": runs,
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> Plan:
    """What the command line asks for; a quick run is two steps, of W2 one group and a narrow layer."""
    parser = argparse.ArgumentParser(description="CPU seconds and memory of a step by phase, lowpeak's beside TRL's.")
    parser.add_argument("--shape", choices=["w1", "w2"], default="w1")
    parser.add_argument("--kind", choices=["canned", "whole"], default="canned")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of W2's prompts")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, help="prompts a step (W2: 2)")
    parser.add_argument("--steps", type=int, help="steps of a run, the first of which is not counted (W1: 20, W2: 3)")
    parser.add_argument("--rounds", type=int, help="runs of each side (W1: 3, W2: 1)")
    parser.add_argument("--ours", type=json.loads, default={}, help="more arguments of our trainer")
    parser.add_argument("--peer", type=json.loads, default={}, help="more arguments of the peer's trainer")
    parser.add_argument("--quick", action="store_true", help="two steps, one round; W2 narrow, with one prompt a step")
    found = parser.parse_args(arguments)
    w1 = found.shape == "w1"
    prompts, steps, rounds = (W1_PROMPTS, 20, 3) if w1 else (2, 3, 1)
    if found.quick:
        prompts, steps, rounds = (prompts if w1 else 1, 2, 1)
    return Plan(
        found.shape,
        found.kind == "canned",
        W1_PROMPT_LENGTH if w1 else found.prompt,
        found.beta,
        found.prompts or prompts,
        found.steps or steps,
        found.rounds or rounds,
        found.quick,
        {OURS: found.ours, PEER: found.peer},
    )


def measure(plan: Plan, folder: Path, sides: Sequence[str]) -> Runs:
    """What each side took in each round: they take turns, each time in a fresh process and from the same weights."""
    start = folder / "start"
    maker = "warm" if plan.shape == "w1" else "shapes"
    run_apart(f"benchmarks.harness.{maker}", {"folder": str(start), "seed": 0, "quick": plan.quick})
    runs: Runs = {side: [] for side in sides}
    for number in range(plan.rounds):
        rows = plan.num_prompts * NUM_GENERATIONS
        lengths = [draw_lengths(rows, 1000 * number + step) for step in range(plan.steps)]
        for side in sides:
            request = request_of(plan, side, lengths, start, folder / f"{side}-{number}")
            found = run_apart("benchmarks.harness.stepping", request)
            lengths = found["lengths"] if plan.shape == "w2" else lengths
            runs[side].append(found)
            print(f"{side}, round {number}: {found['steps']}", file=sys.stderr, flush=True)
    return runs


def request_of(plan: Plan, side: str, lengths: list[list[int]], start: Path, folder: Path) -> dict[str, Any]:
    """One side's request: see stepping.StepRequest."""
    return {
        "library": side,
        "shape": plan.shape,
        "canned": plan.canned,
        "num_prompts": plan.num_prompts,
        "prompt_length": plan.prompt_length,
        "steps": plan.steps,
        "beta": plan.beta,
        "start": str(start),
        "folder": str(folder),
        "lengths": lengths,
        "options": dict(plan.options[side]),
    }


def summary(plan: Plan, runs: Sequence[Mapping[str, Any]], peak: float) -> dict[str, Any]:
    """Medians of a side's seconds, its peaks, the share of useful tokens, and what it reaches of the machine's peak."""
    seconds = median_seconds([step for run in runs for step in run["steps"][1:]])
    lengths = [step for run in runs for step in run["lengths"]]
    means = mean_seconds([step for run in runs for step in run["steps"][1:]])
    reached = gflops_per_second(
        runs[0]["model"],
        [step for run in runs for step in run["lengths"][1:]],
        plan.prompt_length,
        NUM_GENERATIONS,
        {phase: mean for phase, mean in means.items() if phase in runs[0]["tokens"]},  # canned rollouts compute nothing
    )
    useful = sum(useful_tokens(step, plan.prompt_length, NUM_GENERATIONS) for step in lengths)
    computed = {phase: sum(run["tokens"].get(phase, 0) for run in runs) for phase in runs[0]["tokens"]}
    return {
        "seconds": seconds,
        "peak_mb_above_start": max(run["peak_rss_mb"] - run["start_rss_mb"] for run in runs),
        "peak_mb_above_empty": max(run["peak_rss_mb"] - run["empty_rss_mb"] for run in runs),
        "peak_mb": max(run["peak_rss_mb"] for run in runs),
        "start_mb": statistics.median(run["start_rss_mb"] for run in runs),
        "peak_mb_above_start_by_phase": {
            phase: round(max(run["peak_rss_mb_by_phase"].get(phase, 0.0) - run["start_rss_mb"] for run in runs), 1)
            for phase in runs[0]["peak_rss_mb_by_phase"]
        },
        "useful_share": {phase: round(useful / tokens, 3) for phase, tokens in computed.items() if tokens},
        "micro_batches": runs[0]["forwards"].get("train", 0) / plan.steps,
        "gflops": reached,
        "share_of_peak": {phase: round(rate / peak, 3) for phase, rate in reached.items()},
        "loss": runs[0]["loss"],
        "grad_norm": runs[0]["grad_norm"],
    }


def median_seconds(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each phase and of the whole; `rest` is what of each step no phase took."""
    named = PHASES[:-1]
    rows = [{phase: step.get(phase, 0.0) for phase in (*named, "total")} for step in steps]
    for row in rows:
        row["rest"] = row["total"] - sum(row[phase] for phase in named)
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in (*PHASES, "total")}


def mean_seconds(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each phase: of work that differs by step, the sums are compared."""
    return {phase: statistics.fmean(step.get(phase, 0.0) for step in steps) for phase in PHASES[:-1]}


def parts_of_peak(run: Mapping[str, Any]) -> dict[str, Any]:
    """What our peak is made of: MB by arithmetic, the tracker's peaks by phase, and the rest of the training peak.

    Tensors that must be there in training: weights, gradients, AdamW's two states. `logits` is one chunk's; what the
    training phase holds above all these and above the process as it was loaded is activations and temporaries.
    """
    model, own = run["model"], run["own"]
    weights = 4 * (model["body"] + model["head"]) / 2**20
    logits = 4 * model["vocabulary"] * own["sizes"]["logprob_chunk_size"] / 2**20
    parts = {"weights": weights, "gradients": weights, "adam": 2 * weights, "logits of one chunk": logits}
    above = own["peak_memory"]["train"] - run["start_rss_mb"]
    rest = above - 3 * weights - logits
    return {
        "mb": {name: round(mb, 1) for name, mb in {**parts, "activations and temporaries": rest}.items()},
        "tracker_mb_above_start": {n: round(mb - run["start_rss_mb"], 1) for n, mb in own["peak_memory"].items()},
        "sizes": own["sizes"],
    }


def compare(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> dict[str, float | None]:
    """Ours over the peer's: seconds of each phase, and peaks."""
    found = {name: ratio(ours["seconds"][name], peer["seconds"][name]) for name in ours["seconds"]}
    return found | {name: ratio(ours[name], peer[name]) for name in PEAKS}


def show(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> None:
    """One line per phase, then memory."""
    ratios = compare(ours, peer)
    print("| | lowpeak | TRL | ratio | useful tokens, ours / TRL | of the fp32 peak, ours / TRL |")
    print("|---|---|---|---|---|---|")
    for name in (*PHASES, "total"):
        shares = [side[key].get(name, "") for key in ("useful_share", "share_of_peak") for side in (ours, peer)]
        both = " | ".join(f"{a} / {b}" if a != "" else "" for a, b in (shares[:2], shares[2:]))
        print(f"| {name}, s | {ours['seconds'][name]:.3f} | {peer['seconds'][name]:.3f} | {ratios[name]} | {both} |")
    for name, words in PEAKS.items():
        print(f"| {words} | {ours[name]:.0f} | {peer[name]:.0f} | {ratios[name]} | | |")
    print(f"| micro-batches | {ours['micro_batches']:g} | {peer['micro_batches']:g} | | | |")


if __name__ == "__main__":
    main()

"""A DPO step beside TRL's: `python -m benchmarks.preferences [--quick] [--rounds N] [--ours JSON] [--peer JSON]`.

Pairs of a prompt of 512 tokens and two completions of 256, a Qwen2 shape of 90M parameters, 78M of them the tied embedding
of 151,936 tokens; fp32, gradient checkpointing, one thread, a fresh process each. One pair a step, and two of which each is
a micro-batch. Memory: the peak of what torch's allocator gives out from the first step's beginning to its optimizer step,
beside both models' weights. Time: CPU seconds of a whole step, the median over rounds, in which the ways take turns, and
over steps after the first.

TRL 1.16 runs in two ways. As it is on a CPU: its fused LM head scores prompts and completions alike, and its tiles'
operations make temporaries as large as a tile. As on a GPU: only counted positions are scored, and the tiles' operations
run in blocks of 16 rows, which its Triton kernels resemble. All else is as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.preference_pairs import PEER_ON_GPU
from benchmarks.harness.process import run_apart
from benchmarks.harness.report import OURS, PEER, available_sides, print_result, ratio, versions
from benchmarks.step_table import median_seconds

SHAPE = {"prompt_length": 512, "completion_length": 256, "hidden": 512, "layers": 4, "vocabulary": 151_936}
QUICK = {"prompt_length": 64, "completion_length": 32, "hidden": 64, "layers": 1, "vocabulary": 8_192}
CASES = {"one pair": 1, "two pairs, one a micro-batch": 2}
AIMS = {"one pair": {"memory": 0.73, "time": 0.55}, "two pairs, one a micro-batch": {"memory": 0.55, "time": 0.55}}
CHUNK = {"logprob_chunk_size": 128}  # by default it follows free memory


def main() -> None:
    found = parse(sys.argv[1:])
    ways = [OURS] if PEER not in available_sides(found.quick) else [OURS, PEER_ON_GPU, PEER]
    options = {OURS: CHUNK | found.ours, PEER: found.peer, PEER_ON_GPU: found.peer}
    shape: dict[str, Any] = {**(QUICK if found.quick else SHAPE), "steps": 2 if found.quick else 3}
    rows = {case: measure({**shape, "pairs": pairs}, options, ways, found.rounds) for case, pairs in CASES.items()}
    ratios = {case: {way: compare(row, way) for way in ways[1:]} for case, row in rows.items()}
    show(rows, ratios)
    print_result(
        {
            "benchmark": "preferences",
            "shape": shape,
            "unit": "CPU seconds a step; MiB beside both models' weights",
            "rows": rows,
            "ratios": ratios,
            "aims": AIMS,
            "met": {case: met(ratios[case][PEER_ON_GPU], aims) for case, aims in AIMS.items() if PEER in ways},
            "options": options,
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description="CPU seconds and memory of a step of DPO, lowpeak's beside TRL's.")
    parser.add_argument("--quick", action="store_true", help="two steps of short rows and a narrow layer")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each way")
    parser.add_argument("--ours", type=json.loads, default={}, help="more arguments of our trainer")
    parser.add_argument("--peer", type=json.loads, default={}, help="more arguments of the peer's trainer")
    return parser.parse_args(arguments)


def measure(
    request: Mapping[str, Any],
    options: Mapping[str, Mapping[str, Any]],
    ways: Sequence[str],
    rounds: int,
    side: str = "benchmarks.harness.preference_pairs",
) -> dict[str, dict[str, Any]]:
    """What each way took, by the module `side`: they take turns."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            with tempfile.TemporaryDirectory() as folder:
                way_request = {**request, "way": way, "folder": folder, "options": dict(options[way])}
                found = run_apart(side, way_request)
            runs[way].append(found)
            print(f"{way}: {found['step_mb']} MiB, {found['steps']}", file=sys.stderr, flush=True)
    return {way: summary(found, request["steps"]) for way, found in runs.items()}


def summary(runs: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """The first step's memory, median seconds, tokens of a step in all forwards, and what was trained."""
    return {
        "step_mib": max(run["step_mb"] for run in runs),
        "seconds": median_seconds([step for run in runs for step in run["steps"][1:]]),
        "forwarded": {phase: count // steps for phase, count in runs[0]["tokens"].items()},
        "loss": runs[0]["loss"],
        "grad_norm": runs[0]["grad_norm"],
        "sizes": runs[0]["own"].get("sizes"),
    }


def compare(rows: Mapping[str, Mapping[str, Any]], way: str) -> dict[str, float | None]:
    """Ours over another way's."""
    ours, theirs = rows[OURS], rows[way]
    return {
        "memory": ratio(ours["step_mib"], theirs["step_mib"]),
        "time": ratio(ours["seconds"]["total"], theirs["seconds"]["total"]),
    }


def met(ratios: Mapping[str, float | None], aims: Mapping[str, float]) -> dict[str, bool]:
    """Whether each aim is reached."""
    return {name: (found := ratios[name]) is not None and found <= aim for name, aim in aims.items()}


def show(rows: Mapping[str, Mapping[str, Any]], ratios: Mapping[str, Mapping[str, Any]]) -> None:
    """A line for each way; ratios are ours over the line's."""
    print("| | | MiB | ratio | CPU s | ratio | losses | gradient norms |\n|---|---|---|---|---|---|---|---|")
    for case, ways in rows.items():
        for way, row in ways.items():
            of = ratios[case].get(way, {})
            losses, norms = (" ".join(f"{each:.6g}" for each in row[name]) for name in ("loss", "grad_norm"))
            memory, time = (f"{row['step_mib']:.0f} | {of.get('memory', '')}", of.get("time", ""))
            print(f"| {case} | {way} | {memory} | {row['seconds']['total']:.2f} | {time} | {losses} | {norms} |")


if __name__ == "__main__":
    main()

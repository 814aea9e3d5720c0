"""Completions of 16,384 tokens in one GRPO step: `python -m benchmarks.long_completions [--quick]`.

A group of 4 canned completions and its prompt, a small Qwen2 shape with a vocabulary of 32,768, with and without
activation checkpointing, each in a fresh process with one thread: CPU seconds and peak memory above the loaded model by
phase. Both train the same rows from the same weights, so their gradient norms must agree.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import print_result, ratio, versions

PHASES = ("train", "optimizer", "rest")


def main() -> None:
    shape = parse(sys.argv[1:])
    # Without it glibc keeps freed blocks of tens of MB resident, and they look like somebody's peak.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    runs = {}
    print("| activation checkpointing | train, s | total, s | " + " | ".join(f"{p}: peak MB" for p in PHASES) + " |")
    print("|---|---|---|---|---|---|")
    for checkpointing in (True, False):
        run = run_apart("benchmarks.harness.long", {**shape, "checkpointing": checkpointing})
        runs["on" if checkpointing else "off"] = run
        peaks = " | ".join(f"{above(run, phase):.0f}" for phase in PHASES)
        seconds = run["seconds"]
        name = "on" if checkpointing else "off"
        print(f"| {name} | {seconds['train']} | {seconds['total']} | {peaks} |", flush=True)
    on, off = runs["on"], runs["off"]
    print_result(
        {
            "benchmark": "long_completions",
            **shape,
            "unit": "CPU seconds; MB",
            "runs": runs,
            "on_over_off": {
                "train_seconds": ratio(on["seconds"]["train"], off["seconds"]["train"]),
                "train_peak": ratio(above(on, "train"), above(off, "train")),
            },
            "agrees": abs(on["grad_norm"] - off["grad_norm"]) <= 1e-4 * off["grad_norm"],
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """The shape of what is trained."""
    parser = argparse.ArgumentParser(description="CPU seconds and memory of a step on very long completions.")
    parser.add_argument("--length", type=int, default=16_384, help="tokens of a completion")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="completions of 1,024 tokens, 64 wide")
    found = parser.parse_args(arguments)
    hidden, length = (64, 1024) if found.quick else (found.hidden, found.length)
    return {
        "hidden": hidden,
        "layers": found.layers,
        "vocabulary": 32_768,
        "length": length,
        "num_generations": found.generations,
    }


def above(run: dict[str, Any], phase: str) -> float:
    """A phase's peak above the loaded model."""
    return float(run["peak_rss_mb_by_phase"].get(phase, run["start_rss_mb"]) - run["start_rss_mb"])


if __name__ == "__main__":
    main()

"""Tokens per CPU-second of the native engine beside transformers' generate(): `python -m benchmarks.rollout [--quick]`.

The same model, prompts and lengths on both sides, in fresh processes with one thread that take turns. The budget of the
KV cache is what generate() needs for `slots` rows at once, and generate() gets as many rows at a time: in w1 and w2
all of a rollout, which is what a user's one call of generate() runs and its fastest way; in quick and small a
quarter of them, where memory is short. Skewed lengths are exponential, several draws; equal ones are all the longest.
Completions of a group share their prompt, which generate() forwards for each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import OURS, print_result, ratio, versions

PEER = "transformers"
_W2 = {"hidden": 512, "layers": 8, "vocab_size": 151936, "num_prompts": 8, "max_new_tokens": 256, "slots": 64}
_QUICK = {"hidden": 256, "layers": 2, "vocab_size": 2048, "num_prompts": 4, "max_new_tokens": 64, "slots": 8}
_SMALL = {"hidden": 256, "layers": 4, "vocab_size": 8192, "num_prompts": 8, "max_new_tokens": 128, "slots": 16}
# examples/noisy_sort.py
_W1 = {"hidden": 128, "layers": 2, "vocab_size": 13, "num_prompts": 32, "max_new_tokens": 7, "slots": 256}
SHAPES = {
    "quick": {**_QUICK, "prompt_length": 64, "repeats": 3},
    "small": {**_SMALL, "prompt_length": 64},
    "w1": {**_W1, "prompt_length": 7, "heads": 4, "kv_heads": 4, "repeats": 20},
    "w2": {**_W2, "prompt_length": 64},
    "w2-512": {**_W2, "prompt_length": 512},
}
GROUP = {"num_generations": 8}
_FIGURES = ("cpu_seconds", "forward_seconds", "useful", "of_peak", "peak_gflops", "peak_rss_mb")


def main() -> None:
    shape, draws, slots = parse(sys.argv[1:])
    size = {**SHAPES[shape], **GROUP, **({"slots": slots} if slots else {})}
    kinds = {"skewed": [measure(size, True, seed) for seed in range(draws)], "equal": [measure(size, False, 0)]}
    ours, peer, ratios = ({kind: median(runs, name) for kind, runs in kinds.items()} for name in ("ours", "peer", "x"))
    print_result(
        {
            "benchmark": "rollout",
            "shape": shape,
            **size,
            "unit": "tokens per CPU-second, median of draws",
            "ours": ours,
            "peer": peer,
            "ratio": ratios,
            "draws": kinds,
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> tuple[str, int, int]:
    """The shape, how many draws of skewed lengths, and how many rows at once the budget is for (0: the shape's own)."""
    parser = argparse.ArgumentParser(description="Tokens per CPU-second, the native engine's beside generate()'s.")
    parser.add_argument("--quick", action="store_true", help="a smaller model, one draw")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--slots", type=int, default=0)
    found = parser.parse_args(arguments)
    return ("quick", 1, found.slots) if found.quick else (found.shape, found.draws, found.slots)


def measure(size: Mapping[str, Any], skewed: bool, seed: int) -> dict[str, Any]:
    """Both sides on one draw of the lengths: tokens per CPU-second, their ratio, and where the time went."""
    request = {**size, "skewed": skewed, "seed": seed}
    module = "benchmarks.harness.counting"
    ours = run_apart(module, {**request, "library": OURS})
    peer = run_apart(module, {**request, "library": PEER, "lengths": ours["lengths"]})
    assert ours["lengths"] == peer["lengths"], "both sides write completions of the same lengths"
    both = {"ours": ours, "peer": peer}
    found = {
        "seed": seed,
        "tokens": ours["tokens"],
        "ours": rate(ours),
        "peer": rate(peer),
        "x": ratio(rate(ours), rate(peer)),
        **{name: {side: run[name] for side, run in both.items()} for name in _FIGURES},
    }
    print(f"{'skewed' if skewed else 'equal'}: {found}", file=sys.stderr, flush=True)
    return found


def rate(run: Mapping[str, Any]) -> float:
    """Tokens per CPU-second."""
    return round(run["tokens"] / run["cpu_seconds"], 1)


def median(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    """The median over draws."""
    return round(statistics.median(run[name] for run in runs), 3)


if __name__ == "__main__":
    main()

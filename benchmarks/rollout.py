"""Tokens per CPU-second of the native engine beside transformers' generate(): `python -m benchmarks.rollout [--quick]`.

The same model, prompts and lengths on both sides, in fresh processes with one thread that take turns; both have as many
rows at once as the same KV-cache budget holds. Skewed lengths are exponential, several draws; equal ones are all the
longest. Completions of a group share their prompt, which generate() forwards for each.
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
SHAPES = {
    "quick": {"hidden": 256, "layers": 2, "vocab_size": 2048, "num_prompts": 4, "max_new_tokens": 64, "slots": 8},
    "small": {"hidden": 256, "layers": 4, "vocab_size": 8192, "num_prompts": 8, "max_new_tokens": 128, "slots": 16},
    "w2": {"hidden": 512, "layers": 8, "vocab_size": 151936, "num_prompts": 8, "max_new_tokens": 256, "slots": 16},
}
GROUP = {"num_generations": 8, "prompt_length": 64}


def main() -> None:
    shape, draws = parse(sys.argv[1:])
    kinds = {"skewed": [measure(shape, True, seed) for seed in range(draws)], "equal": [measure(shape, False, 0)]}
    ours, peer, ratios = ({kind: median(runs, name) for kind, runs in kinds.items()} for name in ("ours", "peer", "x"))
    print_result(
        {
            "benchmark": "rollout",
            "shape": shape,
            **SHAPES[shape],
            **GROUP,
            "unit": "tokens per CPU-second, median of draws",
            "ours": ours,
            "peer": peer,
            "ratio": ratios,
            "draws": kinds,
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> tuple[str, int]:
    """The shape, and how many draws of skewed lengths."""
    parser = argparse.ArgumentParser(description="Tokens per CPU-second, the native engine's beside generate()'s.")
    parser.add_argument("--quick", action="store_true", help="a smaller model, one draw")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--draws", type=int, default=3)
    found = parser.parse_args(arguments)
    return ("quick", 1) if found.quick else (found.shape, found.draws)


def measure(shape: str, skewed: bool, seed: int) -> dict[str, Any]:
    """Both sides on one draw of the lengths: tokens per CPU-second, their ratio, and peak memory."""
    request = {**SHAPES[shape], **GROUP, "skewed": skewed, "seed": seed}
    module = "benchmarks.harness.counting"
    ours = run_apart(module, {**request, "library": OURS})
    peer = run_apart(module, {**request, "library": PEER, "lengths": ours["lengths"]})
    assert ours["lengths"] == peer["lengths"], "both sides write completions of the same lengths"
    found = {
        "seed": seed,
        "tokens": ours["tokens"],
        "ours": rate(ours),
        "peer": rate(peer),
        "x": ratio(rate(ours), rate(peer)),
        "peak_rss_mb": {"ours": ours["peak_rss_mb"], "peer": peer["peak_rss_mb"]},
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

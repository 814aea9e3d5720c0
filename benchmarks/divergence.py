"""The divergence of a student from a teacher beside TRL's: `python -m benchmarks.divergence [--quick] [--num_tokens T]`.

Divergences of T tokens and the gradients of states [T, 896] and head [151936, 896], teacher [151936, 2048], fp32, T = 1,024
(quick: 64), one thread, a fresh process each: memory above the inputs at its peak, CPU seconds, and both over TRL's.
TRL 1.16 runs as it is, and with its tiles' operations in blocks of 16 rows, which its GPU kernels resemble.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import PEER, print_result, ratio, versions
from benchmarks.logprob_core import summary

BETAS = (1.0, 0.5)
WAYS = ("fused", "recompute", "naive")
PEER_WAYS = (PEER, f"{PEER}, as on a GPU")


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory and CPU seconds of a divergence and its gradients.")
    parser.add_argument("--quick", action="store_true", help="64 tokens in place of 1,024")
    parser.add_argument("--num_tokens", type=int, help="tokens, in place of either")
    parser.add_argument("--chunk_size", type=int, default=64, help="lowpeak's tokens of a chunk")
    parser.add_argument(
        "--no_naive", action="store_true", help="leave the naive way out, whose memory grows by 4.8 MB a token"
    )
    found = parser.parse_args(sys.argv[1:])
    num_tokens = found.num_tokens or (64 if found.quick else 1024)
    # Without it glibc keeps freed blocks of tens of MB resident, and they look like somebody's peak.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    ways = [way for way in WAYS if way != "naive" or not found.no_naive]
    if importlib.util.find_spec(PEER) is None:
        print("trl is not installed: its rows are left out")
    else:
        ways += PEER_WAYS
    rows = {str(beta): measure_ways(ways, beta, num_tokens, found.chunk_size) for beta in BETAS}
    print_result(
        {
            "benchmark": "divergence",
            "num_tokens": num_tokens,
            "chunk_size": found.chunk_size,
            "unit": "CPU seconds; MB above the inputs",
            "rows": rows,
            "ratios": {
                beta: {way: ratios(found, way) for way in PEER_WAYS if way in found} for beta, found in rows.items()
            },
            "versions": versions(),
        }
    )


def measure_ways(ways: list[str], beta: float, num_tokens: int, chunk_size: int) -> dict[str, dict[str, Any]]:
    """Each way, one after the other; a table row is printed as it is known."""
    print("| beta | way | peak MB | CPU s | loss |\n|---|---|---|---|---|")
    rows = {}
    for way in ways:
        request = {"way": way, "beta": beta, "num_tokens": num_tokens, "chunk_size": chunk_size}
        row = rows[way] = summary(run_apart("benchmarks.harness.divergence_head", request))
        print(f"| {beta} | {way} | {row['peak_mb']} | {row['cpu_s']:.2f} | {row['loss']:.6f} |", flush=True)
    return rows


def ratios(rows: dict[str, dict[str, Any]], of: str) -> dict[str, float | None]:
    """The fused way's peak and seconds over those of another."""
    ours, theirs = rows["fused"], rows[of]
    return {
        "peak": ratio(ours["peak_mb"] or 0.0, theirs["peak_mb"] or 0.0),
        "cpu": ratio(ours["cpu_s"], theirs["cpu_s"]),
    }


if __name__ == "__main__":
    main()

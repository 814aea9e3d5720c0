"""The log-prob core beside naive and TRL's: `python -m benchmarks.logprob_core [--quick] [--dtype DTYPE]`.

Log-probs of T tokens from hidden [T, 1024] and a head [151936, 1024], and the gradients of both, T = 4,096 (quick:
64, fp32), one thread, a fresh process each: memory above the inputs at its peak, CPU seconds of forward and backward, and
these over three bare head products (logits, gradient of hidden, gradient of the head) in the same dtype and run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import PEER, print_result, ratio, versions

DTYPES = ("float32", "bfloat16")
OURS = ("one visit", "recompute", "no-grad")
ENTROPY = ", entropy"  # after the name of a way that gives entropies as well
WITH_ENTROPY = ("naive", *OURS, PEER)
Rows = dict[str, dict[str, dict[str, Any]]]  # dtype -> way -> what was measured


def main() -> None:
    num_tokens, chunk_size, dtypes = parse(sys.argv[1:])
    # Without it glibc keeps freed blocks of tens of MB resident, and they look like somebody's peak.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    ways = ["products", "naive", *OURS]
    if importlib.util.find_spec(PEER) is None:
        print("trl is not installed: its rows are left out")
    else:
        ways.append(PEER)
    ways += [way + ENTROPY for way in WITH_ENTROPY if way in ways]
    rows = measure(ways, num_tokens, chunk_size, dtypes)
    print_result(
        {
            "benchmark": "logprob_core",
            "num_tokens": num_tokens,
            "chunk_size": chunk_size,
            "unit": "CPU seconds; MB above the inputs",
            "ours": {
                dtype: {way: found[way] for way in found if way.startswith(OURS)} for dtype, found in rows.items()
            },
            "peer": {dtype: found.get(PEER) for dtype, found in rows.items()},
            "naive": {dtype: found["naive"] for dtype, found in rows.items()},
            "products": {dtype: found["products"] for dtype, found in rows.items()},
            "ratios": {dtype: ratios(found) for dtype, found in rows.items()},
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> tuple[int, int, tuple[str, ...]]:
    """Tokens of the case, lowpeak's tokens of a chunk, and the dtypes."""
    parser = argparse.ArgumentParser(description="Peak memory and CPU seconds of log-probs and their gradients.")
    parser.add_argument("--quick", action="store_true", help="64 tokens in place of 4,096, in fp32")
    parser.add_argument("--chunk_size", type=int, default=256, help="lowpeak's tokens of a chunk")
    parser.add_argument("--dtype", choices=DTYPES, help="one dtype in place of both")
    found = parser.parse_args(arguments)
    dtypes = (found.dtype,) if found.dtype else DTYPES[:1] if found.quick else DTYPES
    return 64 if found.quick else 4096, found.chunk_size, dtypes


def measure(ways: Sequence[str], num_tokens: int, chunk_size: int, dtypes: Sequence[str]) -> Rows:
    """Each way in each dtype, one after the other; a table row is printed as it is known."""
    print("| dtype | way | peak MB | forward s | backward s | CPU s | of three products | of naive |")
    print("|---|---|---|---|---|---|---|---|")
    rows: Rows = {}
    for dtype in dtypes:
        found = rows[dtype] = {}
        for way in ways:
            request = {"way": way.removesuffix(ENTROPY), "num_tokens": num_tokens, "dtype": dtype}
            request |= {"chunk_size": chunk_size, "entropy": way.endswith(ENTROPY)}
            found[way] = summary(run_apart("benchmarks.harness.head", request))
            show(dtype, way, found)
    return rows


def summary(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run with its peak above what was resident before it, and both directions' seconds together."""
    peak, start = run["peak_rss_mb"], run["start_rss_mb"]
    above = None if peak is None or start is None else round(peak - start, 1)
    return {
        "peak_mb": above,
        "cpu_s": round(run["forward_s"] + run["backward_s"], 3),
        **{name: run[name] for name in ("forward_s", "backward_s", "loss", "grad_norms")},
    }


def ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Each way's peak and seconds over naive's, and its seconds over three products'."""
    naive, products = found["naive"], found["products"]
    return {
        way: {
            "peak_of_naive": ratio(row["peak_mb"] or 0.0, naive["peak_mb"] or 0.0),
            "cpu_of_naive": ratio(row["cpu_s"], naive["cpu_s"]),
            "cpu_of_products": ratio(row["cpu_s"], products["cpu_s"]),
        }
        for way, row in found.items()
        if way != "products"
    }


def show(dtype: str, way: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    """One line of the table."""
    row, products = found[way], found["products"]
    of_naive = ratio(row["cpu_s"], found["naive"]["cpu_s"]) if "naive" in found else None
    times = f"{row['forward_s']:.2f} | {row['backward_s']:.2f} | {row['cpu_s']:.2f}"
    of_products = ratio(row["cpu_s"], products["cpu_s"])
    print(f"| {dtype} | {way} | {row['peak_mb']} | {times} | {of_products} | {of_naive} |", flush=True)


if __name__ == "__main__":
    main()

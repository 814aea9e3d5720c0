"""The policy's weights on their way into vLLM: `python -m benchmarks.engine_sync [--quick] [--shapes mid,large]`.

For each shape, engine dtype, transport and bucket size: seconds, the share of them that the proof takes, and the most that was
resident above what was there before, on the trainer's side and on the engine's. Beside it TRL 1.16's way with an engine of this
process (a `load_weights` a tensor), and a request a tensor with one of another process. One thread each, Linux, vLLM installed;
the median of the repeats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import print_result, require, versions

PROOF_SHARE = 0.1
SLACK_MIB = 8  # what allocators and threads take beside tensors


def main() -> None:
    shapes, dtypes, repeats = parse(sys.argv[1:])
    require("vllm", "see the Makefile's test-vllm for its CPU build")
    found = {
        f"{shape}_{dtype}": run_apart(
            "benchmarks.harness.syncing", {"shape": shape, "dtype": dtype, "repeats": repeats}
        )
        for shape in shapes
        for dtype in dtypes
    }
    print_result(
        {
            "benchmark": "engine_sync",
            "unit": "seconds, and MiB above what was resident before",
            "sizes": found,
            "kept": {name: aims(each) for name, each in found.items()},
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> tuple[list[str], list[str], int]:
    """The shapes, the engine's dtypes, and how often each way is measured."""
    parser = argparse.ArgumentParser(description="Weights pushed into vLLM, beside a request a tensor.")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--shapes", default="mid,large")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(arguments)
    return (["quick"] if args.quick else args.shapes.split(",")), args.dtypes.split(","), args.repeats


def aims(found: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """For each way of ours: a bucket on the trainer's side, the largest tensor and a bucket on the engine's, a tenth for the proof.

    In one process both sides' memory is one figure. Shared memory is resident on both sides.
    """
    judged = {}
    for name, way in found["ways"].items():
        if "bucket_mib" in way:
            bucket, largest = way["bucket_mib"], found["largest_mib"]
            trainer = bucket + (largest if name.startswith("process") else 0)
            judged[name] = {
                "trainer": way["trainer_extra_mib"] <= trainer + SLACK_MIB,
                "engine": way["engine_extra_mib"] <= bucket + largest + SLACK_MIB,
                "proof": way["proof_share"] <= PROOF_SHARE,
            }
    return judged


if __name__ == "__main__":
    main()

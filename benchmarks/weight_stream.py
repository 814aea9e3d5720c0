"""Weights leaving a sharded model, slice by slice and by gathers: `python -m benchmarks.weight_stream [--quick]`.

Two gloo ranks of one thread each, under FSDP2 and under ZeRO-3 (where DeepSpeed is installed). Time is the median of the
repeats on the slower rank; memory the most that was resident on a rank above what was there before. Linux.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from benchmarks.harness.ranks import run_all
from benchmarks.harness.report import print_result, versions

MAX_EXTRA_MIB = 10  # at slices of 8 MiB


def main() -> None:
    shape, repeats = parse(sys.argv[1:])
    names = ["fsdp2", *(["zero3"] if find_spec("deepspeed") else [])]
    found = {name: slowest(run_all("benchmarks.harness.streaming", [name, shape, str(repeats)])) for name in names}
    print_result(
        {
            "benchmark": "weight_stream",
            "shape": shape,
            "unit": "seconds, and MiB above the shards, the worse of two ranks",
            "strategies": found,
            "kept": {name: aims(ways) for name, ways in found.items()},
            "versions": versions(),
        }
    )


def parse(arguments: Sequence[str]) -> tuple[str, int]:
    """The shape, and how often each way is measured."""
    parser = argparse.ArgumentParser(description="Streaming weights beside gathering them.")
    parser.add_argument("--quick", action="store_true", help="a small model, each way once")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(arguments)
    return ("quick", 1) if args.quick else ("mid", args.repeats)


def slowest(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each way's figures on the rank where they are worse."""
    ways = ranks[0]["ways"]
    worst = {name: {key: max(rank["ways"][name][key] for rank in ranks) for key in ways[name]} for name in ways}
    return {"model_mib": ranks[0]["model_mib"], **worst}


def aims(ways: Mapping[str, Any]) -> dict[str, bool]:
    """Whether slices of 8 MiB keep to their memory, and are no slower than a gather."""
    ours, gathers = ways["slices_8MiB"], [ways["gather_all"], ways["gather_each"]]
    return {
        "memory": ours["extra_mib"] <= MAX_EXTRA_MIB,
        "time": all(ours["seconds"] <= gather["seconds"] for gather in gathers),
    }


if __name__ == "__main__":
    main()

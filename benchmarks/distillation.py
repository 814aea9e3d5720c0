"""A step of distillation beside TRL's: `python -m benchmarks.distillation [--quick] [--rounds N] [--cases NAME ...]`.

Student: the Qwen2 shape of benchmarks.preferences, 90M parameters; teacher: 232M, twice as wide; both with a vocabulary of
151,936 and fp32. Eight completions a step, two of them a micro-batch, of canned lengths: exponential with a mean of 64
tokens, cut at 256, after prompts of 64 or 512 tokens. Memory and time as in benchmarks.preferences, which also says how TRL
1.16 runs "as on a GPU": beside both models' weights, and without generation.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from benchmarks.harness.preference_pairs import PEER_ON_GPU
from benchmarks.harness.report import OURS, PEER, available_sides, print_result, versions
from benchmarks.preferences import CHUNK, compare, measure, show

SIDE = "benchmarks.harness.distillation_side"
SHAPE = {
    "completions": 8, "completion_length": 256, "hidden": 512, "layers": 4, "teacher_hidden": 1024, "teacher_layers": 6,
    "vocabulary": 151_936, "steps": 3,
}  # fmt: skip
QUICK = SHAPE | {"hidden": 64, "layers": 1, "teacher_hidden": 128, "teacher_layers": 1, "vocabulary": 8_192, "steps": 2}
CASES = {
    "reverse KL, prompts of 64": {"beta": 1.0, "prompt_length": 64},
    "reverse KL, prompts of 512": {"beta": 1.0, "prompt_length": 512},
    "JSD 0.5, prompts of 64": {"beta": 0.5, "prompt_length": 64},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="CPU seconds and memory of a step of distillation, lowpeak's beside TRL's."
    )
    parser.add_argument("--quick", action="store_true", help="two steps of narrow layers")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each way")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ours", type=json.loads, default={}, help="more arguments of our trainer")
    found = parser.parse_args(sys.argv[1:])
    ways = [OURS] if PEER not in available_sides(found.quick) else [OURS, PEER_ON_GPU, PEER]
    options: dict[str, dict[str, Any]] = {OURS: CHUNK | found.ours, PEER: {}, PEER_ON_GPU: {}}
    shape = QUICK if found.quick else SHAPE
    rows = {case: measure({**shape, **CASES[case]}, options, ways, found.rounds, SIDE) for case in found.cases}
    ratios = {case: {way: compare(row, way) for way in ways[1:]} for case, row in rows.items()}
    show(rows, ratios)
    unit = "CPU seconds a step; MiB beside both models' weights"
    print_result(
        {
            "benchmark": "distillation",
            "shape": shape,
            "unit": unit,
            "rows": rows,
            "ratios": ratios,
            "versions": versions(),
        }
    )


if __name__ == "__main__":
    main()

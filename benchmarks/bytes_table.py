"""Bytes per parameter by storage format and strategy: `python -m benchmarks.bytes_table [--strategies ...] [--quick]`.

GRPO steps on canned completions, lowpeak alone, fresh processes of one thread: one process, and two gloo ranks of DDP and
FSDP2. The model is that of ranks_table, 113M parameters. All figures are of the worse rank and divided by the model's
parameters. `tensors` are weights, gradients and optimizer states at the end of a step, each storage once. `floor` is the
arithmetic of the same tensors: weights, gradients, low bits, states; a half of it under FSDP2. `between` is resident memory
between steps, and `peak` the most that is resident, both above the process before it loaded the model.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.ranked import save_model
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.report import OURS, print_result, versions

# Arguments, and bytes of a large matrix's weights, gradients, low bits and states.
FORMATS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 16),
    "fp32, 8-bit states": ({"state_bits": 8}, 10.0625),
    "32 bits, 32-bit states": ({"weight_bits": 32, "state_bits": 32}, 14),
    "32 bits, 8-bit states": ({"weight_bits": 32}, 8.0625),
    "24 bits, 8-bit states": ({"weight_bits": 24}, 7.0625),
    "16 bits, 8-bit states": ({"weight_bits": 16}, 6.0625),
}
STRATEGIES = ("single", "ddp", "fsdp2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument(
        "--quick", action="store_true", help="one process, a small model, fp32 and 32 bits with 8-bit states"
    )
    plan = parser.parse_args()
    if plan.quick:
        plan.strategies, plan.formats = ["single"], ["fp32", "32 bits, 8-bit states"]
    # Without it glibc keeps freed blocks of tens of MB resident.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    print("| strategy | format | floor | tensors | between | peak |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "start", plan.quick)
        rows = [measure(strategy, name, Path(folder)) for strategy in plan.strategies for name in plan.formats]
    print_result({"benchmark": "bytes_table", "unit": "bytes per parameter", "rows": rows, "versions": versions()})


def measure(strategy: str, name: str, folder: Path) -> dict[str, Any]:
    """One format under one strategy, in bytes per parameter; prints a line of the table."""
    options, floor = FORMATS[name]
    request = {
        "library": OURS, "strategy": strategy, "beta": 0.0, "completion": 128, "steps": 2, "canned": True,
        "start": str(folder / "start"), "folder": str(folder / f"{strategy}-{name}"), "options": options,
    }  # fmt: skip
    run = run_apart if strategy == "single" else run_ranks
    ranks = run("benchmarks.harness.ranked", request)["ranks"]
    count = ranks[0]["parameters"]
    mb = {"between": "between_mb", "peak": "peak_mb"}
    found = {
        "floor": floor / 2 if strategy == "fsdp2" else floor,
        "tensors": max(rank["tensor_bytes"] for rank in ranks) / count,
        **{key: max(rank[source] for rank in ranks) * 2**20 / count for key, source in mb.items()},
    }
    print(f"| {strategy} | {name} |", *(f"{value:.2f} |" for value in found.values()), flush=True)
    return {"strategy": strategy, "format": name, **found, "ranks": ranks}


if __name__ == "__main__":
    main()

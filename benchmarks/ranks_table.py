"""A GRPO step's peak per rank beside TRL's: `python -m benchmarks.ranks_table [--strategies ...] [--betas ...] [--quick]`.

Two gloo ranks of one thread each, the same accelerate or DeepSpeed configuration and arguments on both sides, each side's
defaults for the rest, fresh processes in turns. A Qwen2 shape of 113M parameters in fp32 (432 MiB), random, checkpointing,
2 prompts of 64 tokens x 8 completions a step: generated ones are as long as allowed, since random weights do not stop. Memory
is resident memory of the worse rank above the process before it loaded the model, in MiB, sampled every
10 ms; seconds are the last step's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.ranked import save_model
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.report import OURS, PEER, available_sides, print_result, ratio, versions

PHASES = ("rollout", "score", "train")
# What TRL has where we have a budget, which is left to `auto`.
PEER_WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "zero3": {"gathered": {"ds3_gather_for_generation": True}, "not gathered": {"ds3_gather_for_generation": False}}
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", nargs="+", default=["fsdp2", "zero3", "zero2", "ddp"])
    parser.add_argument("--betas", nargs="+", type=float, default=[0.0, 0.04])
    parser.add_argument("--completion", type=int, default=128, help="tokens of each completion")
    parser.add_argument("--steps", type=int, default=2, help="steps of a run; memory is of all, seconds of the last")
    parser.add_argument("--ours", type=json.loads, default={}, help="more arguments of our trainer")
    parser.add_argument("--peer", type=json.loads, default={}, help="more arguments of the peer's trainer")
    parser.add_argument("--limit", type=float, default=900, help="seconds of a run")
    parser.add_argument(
        "--canned", action="store_true", help="completions of exponential lengths that nobody generates"
    )
    parser.add_argument(
        "--quick", action="store_true", help="FSDP2 and ZeRO-3, beta 0, completions of 16 tokens, a small model"
    )
    plan = parser.parse_args()
    if plan.quick:
        plan.strategies, plan.betas, plan.completion = ["fsdp2", "zero3"], [0.0], 16
    sides = available_sides(plan.quick)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    rows = []
    print(
        "| strategy, beta | side | peak | above loaded | TRL / ours | rollout | score | train | rest | s a step | losses |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        save_model(start, plan.quick)
        for beta in plan.betas:
            for strategy in plan.strategies:
                rows += compared(plan, sides, strategy, beta, start, Path(folder))
    print_result(
        {
            "benchmark": "ranks_table",
            "completion": plan.completion,
            "canned": plan.canned,
            "rows": rows,
            "versions": versions(),
        }
    )
    if any("error" in row for row in rows if row["library"] == OURS):
        sys.exit(1)


def compared(
    plan: argparse.Namespace, sides: Sequence[str], strategy: str, beta: float, start: Path, folder: Path
) -> list[dict[str, Any]]:
    """Both sides under one strategy, TRL in each of its ways; each is printed when it is there."""
    peers = {"": {}} if plan.canned else PEER_WAYS.get(strategy, {"": {}})
    ways: list[tuple[str, str, dict[str, Any]]] = [(OURS, "", plan.ours)]
    ways += [(PEER, name, {**options, **plan.peer}) for name, options in peers.items() if PEER in sides]
    rows: list[dict[str, Any]] = []
    for library, name, options in ways:
        request = {
            "library": library, "strategy": strategy, "beta": beta, "completion": plan.completion, "steps": plan.steps,
            "start": str(start), "folder": str(folder / f"{library}{len(rows)}-{strategy}-{beta}"),
            "canned": plan.canned, "options": options,
        }  # fmt: skip
        row: dict[str, Any] = {"strategy": strategy, "beta": beta, "library": library, "way": name}
        try:
            row |= run_ranks("benchmarks.harness.ranked", request, limit_s=plan.limit)
        except Exception as error:  # a side that fails is a row of the table
            row["error"] = last_words(str(error))
            print(str(error)[-3000:], file=sys.stderr)
        rows.append(row)
        show(row, rows[0])
    return rows


def show(row: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """One line of the table."""
    head = f"| {row['strategy']}, {row['beta']:g} | {row['library']} {row['way']}"
    if "error" in row:
        print(f"{head} | {row['error']} |" + " |" * 8, flush=True)
        return
    found, own = worst(row), worst(ours) if "ranks" in ours else {}
    phases = " | ".join(f"{found['by_phase'].get(phase, 0):.0f}" for phase in (*PHASES, "rest"))
    over = ratio(found["peak"], own["peak"]) if own else ""
    losses = " ".join(f"{loss:.2g}" for loss in row["ranks"][0]["loss"])
    print(
        f"{head} | {found['peak']:.0f} | {found['above']:.0f} | {over} | {phases} | {found['seconds']:.1f} | {losses} |",
        flush=True,
    )


def worst(row: Mapping[str, Any]) -> dict[str, Any]:
    """The worse rank's numbers."""
    ranks = row["ranks"]
    names = {name for rank in ranks for name in rank["peak_mb_by_phase"]}
    return {
        "peak": max(rank["peak_mb"] for rank in ranks),
        "above": max(rank["peak_mb_above_loaded"] for rank in ranks),
        "by_phase": {name: max(rank["peak_mb_by_phase"].get(name, 0) for rank in ranks) for name in names},
        "seconds": max(rank["seconds"]["total"] for rank in ranks),
    }


def last_words(message: str) -> str:
    """The last line that names an error."""
    lines = [line for line in message.splitlines() if "Error" in line]
    return (lines or message.splitlines() or ["no message"])[-1].strip()


if __name__ == "__main__":
    main()

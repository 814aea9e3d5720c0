"""Conversations with a tool, next to TRL's: `python -m benchmarks.tools [--kind learn|turns|waits|tails|same|routes] [--quick]`.

    learn   the calculator of examples/calculator.py: CPU seconds of 150 steps, and held-out accuracy, for each seed
    turns   four calls and an answer: tokens forwarded in generation and in training per useful token; peak memory
    waits   32 such conversations, whose calls take 0.1 s: seconds beyond those of calls that take none
    tails   lowpeak alone, 0.05 s times Pareto draws of exponent 1.5: seconds beyond, per second of the slowest one's calls
    same    one step on fixed transcripts: masks, metrics, the loss and the gradient norm
    routes  lowpeak alone: programs that ask for the same conversations by chat and by tokens; conversations per second, rewards

Useful tokens: each completion's (sampled and the tool's) once, each prompt's once per group. Both sides train the same weights
on the same prompts with the same settings, in turns, each in a fresh process with one thread. `--vllm` lets lowpeak learn alone,
over a vLLM in its process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import OURS, PEER, available_sides, mean, print_result, ratio, versions

SIDE = "benchmarks.harness.tool_side"
TERMS = 5  # of a sum with four calls
LONGEST = 160  # tokens of a conversation of five turns
# What both sides log, besides the seconds.
COMPARED = (
    *("loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "entropy", "num_tokens"),
    *("tools/call_frequency", "tools/failure_frequency", "completions/clipped_ratio"),
    *(f"completions/{name}_{kind}length" for name in ("mean", "min", "max") for kind in ("", "terminated_")),
)
TOLERANCE = 1e-5  # relative


@dataclass(frozen=True)
class Plan:
    """What is run."""

    kind: str
    seeds: tuple[int, ...]
    steps: int
    warm_steps: int
    num_prompts: int
    vllm: bool
    quick: bool
    width: int | None = None


def main() -> None:
    plan = parse(sys.argv[1:])
    sides = [OURS] if plan.vllm or plan.kind in ("tails", "routes") else available_sides(plan.quick)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # without it freed blocks stay resident, and look like a peak
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    measure = {
        "learn": learn,
        "turns": count_turns,
        "waits": wait_for_tools,
        "tails": wait_for_tools,
        "same": compare_steps,
        "routes": compare_routes,
    }[plan.kind]
    with tempfile.TemporaryDirectory() as folder:
        result = measure(plan, sides, Path(folder))
    print_result({"benchmark": "tools", **asdict(plan), **result, "versions": versions()})


def parse(arguments: Sequence[str]) -> Plan:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description="Compare conversations with a tool with TRL's.")
    parser.add_argument("--kind", choices=["learn", "turns", "waits", "tails", "same", "routes"], default="same")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="default: 150 to learn, 4 for turns, 2 for waits and tails")
    parser.add_argument("--warm-steps", type=int, default=160, help="supervised steps before")
    parser.add_argument("--vllm", action="store_true", help="learn: lowpeak alone, generating with vLLM")
    parser.add_argument(
        "--width", type=int, help="routes: of a model of 8 layers (default: the calculator's, 2 of 128)"
    )
    parser.add_argument("--quick", action="store_true", help="a step on few prompts: whether it runs at all")
    found = parser.parse_args(arguments)
    seeds = tuple(found.seeds) if found.kind == "learn" else (0,)
    if found.quick:
        return Plan(found.kind, seeds[:1], 1, 2, 2, vllm=found.vllm, quick=True)
    steps = found.steps or {"learn": 150, "turns": 4, "waits": 2, "tails": 2, "same": 1, "routes": 20}[found.kind]
    num_prompts = {"learn": 32, "turns": 16, "waits": 4, "tails": 4, "same": 2, "routes": 32}[found.kind]
    return Plan(found.kind, seeds, steps, found.warm_steps, num_prompts, found.vllm, quick=False, width=found.width)


def request_of(plan: Plan, side: str, seed: int, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return one side's request: see tool_side.ToolRequest."""
    return {
        "library": side,
        "start": str(folder / f"start-{seed}"),
        "folder": str(folder / f"{side}-{seed}"),
        "steps": plan.steps,
        "num_prompts": plan.num_prompts,
        "seed": seed,
        **changes,
    }


def warm_start(plan: Plan, seed: int, folder: Path, **changes: Any) -> None:
    """Save the model that both sides train."""
    run_apart(SIDE, {"folder": str(folder / f"start-{seed}"), "seed": seed, "steps": plan.warm_steps, **changes})


def learn(plan: Plan, sides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return CPU seconds and accuracies of each seed, and the ratio of the seconds."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    changes = {"settings": {"use_vllm": True, "vllm_enable_sleep_mode": False}} if plan.vllm else {}
    for seed in plan.seeds:
        warm_start(plan, seed, folder, num_terms=2)
        found = {side: run_apart(SIDE, request_of(plan, side, seed, folder, **changes)) for side in sides}
        models = {side: str(folder / f"{side}-{seed}") for side in sides} | {"start": str(folder / f"start-{seed}")}
        inputs = {"models": models, "held_out": 16 if plan.quick else 512, "folder": str(folder / "accuracy")}
        accuracies = run_apart(SIDE, inputs)
        for side in sides:
            rewards = [round(log["reward"], 3) for log in found[side]["logs"]]
            row = {"seed": seed, "start": accuracies["start"], "end": accuracies[side], "rewards": rewards}
            runs[side].append(
                {**row, **{name: found[side][name] for name in ("cpu_seconds", "seconds", "peak_rss_mb")}}
            )
            print(f"{side}: {runs[side][-1]}", file=sys.stderr, flush=True)
    means = {side: mean([run["cpu_seconds"] for run in runs[side]]) for side in sides}
    return {"ours": runs[OURS], "peer": runs.get(PEER), "ratio": {"cpu_seconds": _ratio(means)}, "aim": 0.5}


def count_turns(plan: Plan, sides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return tokens forwarded per useful token, and peaks of memory above the loaded model."""
    warm_start(plan, 0, folder, num_terms=TERMS, guess_share=0.0)
    rows = {}
    for side in sides:
        found = run_apart(SIDE, _five_turns(plan, side, folder))
        useful = found["tokens"]["useful"]
        rows[side] = {
            "generated_per_useful": round(found["tokens"]["generated"] / useful, 3),
            "trained_per_useful": round(found["tokens"]["trained"] / useful, 3),
            "peak_mb_above_start": round(found["peak_rss_mb"] - found["start_rss_mb"], 1),
            "cpu_seconds": found["cpu_seconds"],
            "calls_per_conversation": mean([log["tools/call_frequency"] for log in found["logs"]]),
        }
        print(f"{side}: {rows[side]}", file=sys.stderr, flush=True)
    names = ("peak_mb_above_start", "cpu_seconds")
    ratios = {name: _ratio({side: row[name] for side, row in rows.items()}) for name in names}
    aim = {"generated_per_useful": 1.08, "trained_per_useful": 0.94, "peak_mb_above_start": 0.65}
    return {"ours": rows[OURS], "peer": rows.get(PEER), "ratio": ratios, "aim": aim}


def wait_for_tools(plan: Plan, sides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return seconds with slow tools and with tools that take no time, and what the slow ones add.

    On a busy machine `blocked` is what they add to the seconds in which the engine's thread neither computes nor waits for a CPU;
    `blocked_per_slowest` divides it by the seconds of the slowest conversation's calls, summed over rollouts.
    """
    warm_start(plan, 0, folder, num_terms=TERMS, guess_share=0.0)
    delays = {"delay": 0.05, "tail": 1.5} if plan.kind == "tails" else {"delay": 0.1}
    rows = {}
    for side in sides:
        quick, slow = (run_apart(SIDE, _five_turns(plan, side, folder, **changes)) for changes in ({}, delays))
        blocked = slow["blocked"] - quick["blocked"]
        rows[side] = {
            "seconds": quick["seconds"],
            "with_delay": slow["seconds"],
            "beyond": round(slow["seconds"] - quick["seconds"], 2),
            "blocked": round(blocked, 2),
            "slowest": slow["slowest"],
            "blocked_per_slowest": round(blocked / slow["slowest"], 2) if slow["slowest"] else None,
            "calls_per_conversation": mean([log["tools/call_frequency"] for log in slow["logs"]]),
        }
        print(f"{side}: {rows[side]}", file=sys.stderr, flush=True)
    aim = {"blocked_per_slowest": 1.5} if plan.kind == "tails" else {"beyond": 1.5}
    return {"ours": rows[OURS], "peer": rows.get(PEER), "aim": aim}


def _five_turns(plan: Plan, side: str, folder: Path, **changes: Any) -> dict[str, Any]:
    settings = {"max_tool_calling_iterations": TERMS - 1, "learning_rate": 1e-5, "logging_steps": 1}
    request = request_of(plan, side, 0, folder, num_terms=TERMS, max_completion_length=LONGEST, **changes)
    return {**request, "settings": settings}


def compare_steps(plan: Plan, sides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return both sides' metrics of a step on fixed transcripts, and the names of those that differ."""
    warm_start(plan, 0, folder, num_terms=2)
    found = {
        side: run_apart(SIDE, request_of(plan, side, 0, folder, canned=True, max_completion_length=100))
        for side in sides
    }
    metrics = {side: {name: row["logs"][0][name] for name in COMPARED} for side, row in found.items()}
    differences = None
    if PEER in sides:
        differences = [name for name in COMPARED if not _is_close(metrics[OURS][name], metrics[PEER][name])]
        differences += ["masks"] if found[OURS]["masks"] != found[PEER]["masks"] else []
        print(f"differences: {differences or 'none'}")
    return {"ours": metrics[OURS], "peer": metrics.get(PEER), "differences": differences}


def compare_routes(plan: Plan, sides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return seconds, conversations per second and rewards with `tools=`, and with programs by chat and by tokens."""
    warm_start(plan, 0, folder, num_terms=2, width=plan.width)
    rows = {}
    for program in (None, "chat", "tokens"):
        found = run_apart(SIDE, request_of(plan, OURS, 0, folder, program=program, settings={"logging_steps": 1}))
        turns = [log["programs/turns"] for log in found["logs"] if program is not None]
        rows[program or "tools"] = {
            "turns_per_conversation": mean(turns) if turns else None,
            **{name: found[name] for name in ("seconds", "cpu_seconds", "peak_rss_mb")},
            "conversations_per_second": round(plan.steps * plan.num_prompts * 8 / found["seconds"], 1),
            "rewards": [round(log["reward"], 4) for log in found["logs"]],
        }
        print(f"{program}: {rows[program or 'tools']}", file=sys.stderr, flush=True)
    rates = {name: row["conversations_per_second"] for name, row in rows.items()}
    return {
        "ours": rows,
        "ratio": {name: round(rates[name] / rates["tools"], 3) for name in ("chat", "tokens")},
        "aim": 0.8,
    }


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other))


def _ratio(values: Mapping[str, float]) -> float | None:
    return ratio(values[OURS], values[PEER]) if PEER in values else None


if __name__ == "__main__":
    main()

"""SmolLM2-135M-Instruct next to TRL: `python -m benchmarks.real_model [--quick] [--task sums] [--kinds fp32 bf16 lora]`.

For each kind and seed both libraries train the same weights on the same prompts with the same settings, each in a fresh process
with one thread. A run reaches a reward at the first step at which the mean reward of the last five steps is at least
that. Held-out accuracy is greedy, by transformers' `generate()`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.process import run_apart
from benchmarks.harness.real_side import GENERATIONS, REWARDS
from benchmarks.harness.report import OURS, PEER, SIDES, mean, print_result, ratio, require, require_peer, versions
from benchmarks.harness.task import load_example

KINDS = ("fp32", "uncheckpointed", "bf16", "lora")
REWARD = 0.8
WINDOW = 5  # steps


def main() -> None:
    """Run both sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one step of fp32, lowpeak alone: whether it runs at all")
    parser.add_argument("--task", choices=list(REWARDS), default="sums")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--save", type=Path, help="results of this task so far, to go on from")
    parser.add_argument("--picture", type=Path, help="a picture of rewards over CPU minutes")
    options = parser.parse_args()
    if options.picture:
        require("matplotlib", "pip install '.[plot]'")
    if options.quick:
        options.kinds, options.seeds, options.steps, options.sides = ["fp32"], [0], 1, [OURS]
    if PEER in options.sides:
        require_peer()
    model = find_model()
    runs: dict[str, dict[str, Any]] = (
        json.loads(options.save.read_text()) if options.save and options.save.exists() else {}
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            for seed in options.seeds:
                for side in options.sides:
                    name = f"{kind} {seed} {side}"
                    if name in runs and len(runs[name]["rewards"]) == options.steps:
                        continue
                    request = {"library": side, "kind": kind, "seed": seed, "steps": options.steps}
                    request |= {
                        "model": model,
                        "folder": folder,
                        "held_out": 8 if options.quick else 64,
                        "task": options.task,
                    }
                    runs[name] = run_apart("benchmarks.harness.real_side", request, limit_s=4 * 3600)
                    print(f"{name}: {summary(runs[name])}", file=sys.stderr, flush=True)
                    if options.save:
                        options.save.write_text(json.dumps(runs))
    runs = {
        name: run
        for name, run in runs.items()
        if name.split()[0] in options.kinds and int(name.split()[1]) in options.seeds
    }
    print(table(runs, options.kinds, options.seeds))
    if options.picture:
        draw(runs, options.picture)
    print_result({"benchmark": "real_model", "runs": runs, "versions": versions()})


def find_model() -> str:
    """Return the model's folder; exit with one sentence where it cannot be downloaded."""
    smollm2 = load_example("get_smollm2")
    try:
        return str(smollm2.get_smollm2())
    except smollm2.DownloadError as error:
        sys.exit(str(error))


def step_of_reward(rewards: Sequence[float]) -> int | None:
    """The first step, from 0, at which the mean reward of the last WINDOW steps is at least REWARD."""
    ends = range(WINDOW, len(rewards) + 1)
    return next((end - 1 for end in ends if mean(rewards[end - WINDOW : end]) >= REWARD), None)


def summary(run: Mapping[str, Any]) -> dict[str, float | None]:
    """A run in a few numbers; `until` means until REWARD is reached."""
    step = step_of_reward(run["rewards"])
    tokens = sum(run["lengths"]) * load_example("sums").PROMPTS * GENERATIONS
    return {
        "cpu_ms_per_token": round(1e3 * run["cpu_seconds"][-1] / tokens, 1),
        "peak_mb": run["peak_rss_mb_by_phase"].get("training"),
        "steps_until": None if step is None else step + 1,
        "cpu_seconds_until": None if step is None else run["cpu_seconds"][step],
        "minutes_until": None if step is None else round(run["seconds"][step] / 60, 1),
        "accuracy_before": run["accuracy"][0],
        "accuracy_after": run["accuracy"][1],
    }


def table(runs: Mapping[str, Mapping[str, Any]], kinds: Sequence[str], seeds: Sequence[int]) -> str:
    """A row for each kind and side, means over the seeds, and ours over the peer's."""
    names = ("cpu_ms_per_token", "peak_mb", "steps_until", "cpu_seconds_until", "minutes_until", "accuracy_after")
    lines = ["| run | " + " | ".join(name.replace("_", " ") for name in names) + " |", "| -- |" + " -- |" * len(names)]
    for kind in kinds:
        rows = {}
        for side in SIDES:
            found = [summary(runs[f"{kind} {seed} {side}"]) for seed in seeds if f"{kind} {seed} {side}" in runs]
            if found:
                rows[side] = {name: _mean([each[name] for each in found]) for name in names}
                lines.append(f"| {kind}, {side} | " + " | ".join(map(_show, rows[side].values())) + " |")
        if len(rows) == len(SIDES):
            pairs = zip(rows[OURS].values(), rows[PEER].values(), strict=True)
            cells = [_show(None if ours is None or peer is None else ratio(ours, peer)) for ours, peer in pairs]
            lines.append(f"| {kind}, ratio | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(runs: Mapping[str, Mapping[str, Any]], picture: Path) -> None:
    """Save a line for each run: the mean reward of the last WINDOW steps over CPU minutes, TRL's dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    colors = dict(zip(KINDS, ("#9d1b32", "#8a6d3b", "#30638e", "#3d9970"), strict=True))
    for name, run in runs.items():
        kind, seed, side = name.split()
        rewards = [mean(run["rewards"][max(0, i - WINDOW + 1) : i + 1]) for i in range(len(run["rewards"]))]
        minutes = [seconds / 60 for seconds in run["cpu_seconds"]]
        style = "--" if side == PEER else "-"
        axes.plot(minutes, rewards, style, color=colors[kind], label=f"{side}, {kind}, seed {seed}")
    axes.set(xlabel="CPU minutes, one thread", ylabel=f"reward, mean of {WINDOW} steps", ylim=(0, 1.02))
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(picture)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:,.0f}"


if __name__ == "__main__":
    main()

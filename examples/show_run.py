"""What quickstart.py prints and draws: completions before and after, a curve."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset

from lowpeak.report import write_report

SHOWN = 8
# What the curve shows: the first of these that an algorithm logs.
CURVES = {
    "reward": "reward of the sampled completions",
    "rewards/accuracies": "pairs in the right order",
    "loss": "loss",
}


def accuracies(prediction: Any) -> tuple[float, float]:
    """The greedy and the sampled accuracy."""
    return prediction.metrics["eval_greedy_accuracy"], prediction.metrics["eval_accuracy"]


def show_accuracy(when: str, prediction: Any) -> None:
    """Both accuracies on the held-out prompts, in one line."""
    greedy, sampled = accuracies(prediction)
    number = len({row["group"] for row in prediction.predictions})
    print(
        f"     {when:6s}  accuracy on {number} held-out prompts: greedy {greedy:.2f}, sampled {sampled:.2f}", flush=True
    )


def show(held_out: Dataset, before: Any, after: Any) -> None:
    """A few sampled completions before and after, and the accuracies."""
    answers = {question(row): row["answer"] for row in held_out}
    print()
    for old, new in zip(sampled_rows(before), sampled_rows(after), strict=True):
        print(f"{question(old)}  ({answers[question(old)]})")
        for when, row in (("before", old), ("after", new)):
            print(f"     {when:6s}  {text_of(row['completion'])}  {'ok' if row['reward'] == 1 else 'wrong'}")
    print()
    show_accuracy("before", before)
    show_accuracy("after", after)


def draw_curve(trainer: Any, before: Any, after: Any, picture: Path) -> None:
    """Save a curve of the steps, and the held-out accuracy before and after, as a picture."""
    from matplotlib.figure import Figure

    history = trainer.state.log_history
    name = next(name for name in CURVES if any(name in log for log in history))
    steps, values = zip(*((log["step"], log[name]) for log in history if name in log), strict=True)
    figure = Figure(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, values, color="#dd4b39", label=CURVES[name])
    ends = [0, trainer.args.max_steps]
    axes.plot(ends, [accuracies(each)[0] for each in (before, after)], "o", color="#30638e", label="held out, greedy")
    axes.set(xlabel="step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(picture)


def show_files(output_dir: str, next_command: str | None, seconds: float) -> None:
    """The seconds, where the files are, and what to try next."""
    print(f"\n{seconds:.0f} seconds in all. The run's files are in {output_dir}: the trained model, curve.png, and")
    sampled = " and per completion (rollouts.jsonl)" if Path(output_dir, "journal", "rollouts.jsonl").exists() else ""
    print(f"journal/ with one line per step (steps.jsonl){sampled} for pandas or polars.")
    print(f"Curves and completions, in a browser: {write_report([Path(output_dir)])}")
    if next_command is None:
        return
    command = Path(sys.executable).with_name("lowpeak")
    here = command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else "lowpeak"
    print(f"Next: {here} {next_command}")


def question(row: Mapping[str, Any]) -> str:
    """The text of a row's prompt."""
    prompt = row["prompt"]
    return str(prompt if isinstance(prompt, str) else prompt[-1]["content"])


def text_of(completion: Any) -> str:
    """A completion in one line: a conversation's messages and calls, `add(a=48, b=88) -> 136 -> 136`."""
    if isinstance(completion, str):
        return " ".join(completion.split())
    parts = []
    for message in completion:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [f"{each['name']}({', '.join(f'{k}={v}' for k, v in each['arguments'].items())})" for each in functions]
        parts.append(" ".join([*(message.get("content") or "").split(), *calls]))
    return " -> ".join(parts)


def sampled_rows(prediction: Any) -> list[dict[str, Any]]:
    """One sampled completion for each of a few prompts: the first of its group, whatever it is worth."""
    firsts: dict[Any, dict[str, Any]] = {}
    for row in prediction.predictions:
        if row["decoding"] == "sampled":
            firsts.setdefault(row["group"], row)
    return [firsts[group] for group in random.Random(0).sample(sorted(firsts), SHOWN)]

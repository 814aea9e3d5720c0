"""Draws what storage formats learn: `python -m benchmarks.plot_formats [--quick] [--data FILE] [--picture FILE]`.

The data are what `storage_formats --save FILE` wrote. Held-out accuracy (sampled) over steps, a panel for each algorithm
and learning rate: the mean of the seeds by format, and the range of fp32's seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.process import ROOT
from benchmarks.harness.report import mean, print_result, require
from benchmarks.plot_curve import GRID, INK, save

STYLES = {
    "fp32": ("#333333", "-"),
    "32 bits, 8-bit states": ("#9d1b32", "-"),
    "24 bits, 8-bit states": ("#dd4b39", "--"),
    "16 bits, 8-bit states": ("#f29e4c", "-."),
    "TRL, bf16": ("#30638e", ":"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only try: the picture is not kept")
    parser.add_argument("--data", type=Path, default=ROOT / "docs" / "formats.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "formats.png")
    plan = parser.parse_args()
    require("matplotlib", "pip install 'lowpeak[plot]'")
    runs = json.loads(plan.data.read_text(encoding="utf-8"))["runs"]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / plan.picture.name if plan.quick else plan.picture
        draw(runs, target)
        size = target.stat().st_size
    print_result({"benchmark": "plot_formats", "picture": plan.picture.name, "bytes": size, "kept": not plan.quick})


def draw(runs: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draw a panel for each algorithm and learning rate."""
    from matplotlib.figure import Figure

    algorithms = list(dict.fromkeys(run["algorithm"] for run in runs))
    rates = list(dict.fromkeys(run["rate"] for run in runs))
    figure = Figure(figsize=(3.2 * len(algorithms), 2.6 * len(rates)), layout="constrained")
    panels = figure.subplots(len(rates), len(algorithms), squeeze=False, sharex=True)
    for row, rate in zip(panels, rates, strict=True):
        for panel, algorithm in zip(row, algorithms, strict=True):
            _draw_panel(panel, [run for run in runs if (run["algorithm"], run["rate"]) == (algorithm, rate)])
            panel.set_title(f"{algorithm.upper()}, learning rate {rate:g}", fontsize=9, color=INK)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    save(figure, picture)


def _draw_panel(panel: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    for name, (color, line) in STYLES.items():
        curves = [_curve(run) for run in runs if run["format"] == name]
        if not curves:
            continue
        steps = [step for step, _ in curves[0]]
        by_step = [[curve[i][1] for curve in curves] for i in range(len(steps))]
        panel.plot(steps, [mean(values) for values in by_step], line, color=color, label=name, linewidth=1.5)
        if name == "fp32":
            panel.fill_between(
                steps, [min(values) for values in by_step], [max(values) for values in by_step], color=GRID
            )
    panel.tick_params(labelsize=8, colors=INK)
    panel.spines[["top", "right"]].set_visible(False)


def _curve(run: Mapping[str, Any]) -> list[tuple[int, float]]:
    return sorted((int(step), accuracy["sampled"]) for step, accuracy in run["accuracy"].items())


if __name__ == "__main__":
    main()

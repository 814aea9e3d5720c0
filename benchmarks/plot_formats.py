"""Draws what storage formats learn: `python -m benchmarks.plot_formats [--quick] [--data FILE] [--picture FILE]`.

The data are what `storage_formats --save FILE` wrote. Held-out accuracy (sampled) after the last step, a panel for each
algorithm and learning rate: a dot for each seed by format, and the range of fp32's seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.process import ROOT
from benchmarks.harness.report import print_result, require
from benchmarks.plot_curve import GRID, INK, save

COLORS = {
    "fp32": "#333333",
    "32 bits, 8-bit states": "#9d1b32",
    "24 bits, 8-bit states": "#dd4b39",
    "16 bits, 8-bit states": "#f29e4c",
    "TRL, bf16": "#30638e",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only try: the picture is not kept")
    parser.add_argument("--data", type=Path, default=ROOT / "docs" / "formats.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "formats.png")
    plan = parser.parse_args()
    require("matplotlib", "pip install '.[plot]'")
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
    figure = Figure(figsize=(2.6 * len(algorithms), 2.4 * len(rates)), dpi=150, layout="constrained")
    panels = figure.subplots(len(rates), len(algorithms), squeeze=False, sharey="row")
    for row, rate in zip(panels, rates, strict=True):
        for panel, algorithm in zip(row, algorithms, strict=True):
            _draw_panel(panel, [run for run in runs if (run["algorithm"], run["rate"]) == (algorithm, rate)])
            panel.set_title(f"{algorithm.upper()}, learning rate {rate:g}", fontsize=9, color=INK)
        row[0].set_ylabel("accuracy", fontsize=8, color=INK)
        row[0].set_ylim(0, 1.1 * row[0].get_ylim()[1])
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save(figure, picture)


def _draw_panel(panel: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    for place, (name, color) in enumerate(COLORS.items()):
        values = [run["accuracy"][max(run["accuracy"], key=int)]["sampled"] for run in runs if run["format"] == name]
        if name == "fp32":
            panel.axhspan(min(values), max(values), color=GRID, zorder=0)
        panel.scatter([place] * len(values), values, s=22, color=color, label=name)
    panel.set_xlim(-0.5, len(COLORS) - 0.5)
    panel.set_xticks([])
    panel.tick_params(labelsize=8, colors=INK)
    panel.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()

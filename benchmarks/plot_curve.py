"""Draws a measured learning curve: `python -m benchmarks.plot_curve [--quick] [--data FILE] [--picture FILE]`.

The data are what `learning_curve --save FILE` wrote. Held-out accuracy (sampled) over steps: a line for each of our
seeds, and the mean of TRL's seeds with two standard deviations around it.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.process import ROOT
from benchmarks.harness.report import deviation, mean, print_result, require

OUR_COLORS = ("#9d1b32", "#dd4b39", "#f29e4c")
PEER_COLOR, INK, GRID = "#30638e", "#333333", "#ececec"
PALETTE = 64  # colours of the saved picture: enough for smooth lines, a quarter of the bytes


def main() -> None:
    data, picture, quick = parse(sys.argv[1:])
    require("matplotlib", "pip install '.[plot]'")
    result = json.loads(data.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / picture.name if quick else picture
        draw(result, target)
        size = target.stat().st_size
    print_result(
        {"benchmark": "plot_curve", "data": data.name, "picture": picture.name, "bytes": size, "kept": not quick}
    )


def parse(arguments: Sequence[str]) -> tuple[Path, Path, bool]:
    """Where the data are, where the picture goes, and whether it is only tried."""
    parser = argparse.ArgumentParser(description="Draw a measured learning curve.")
    parser.add_argument("--quick", action="store_true", help="only try: the picture is not kept")
    parser.add_argument("--data", type=Path, default=ROOT / "docs" / "curve.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "curve.png")
    found = parser.parse_args(arguments)
    return found.data, found.picture, found.quick


def curve(run: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Step and sampled accuracy of one seed, in order."""
    return sorted((int(step), accuracy["sampled"]) for step, accuracy in run["accuracy"].items())


def band(runs: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float]]:
    """Step, mean over seeds, and two standard deviations, in order."""
    by_step = zip(*(curve(run) for run in runs), strict=True)
    return [(at[0][0], mean([value for _, value in at]), 2 * deviation([value for _, value in at])) for at in by_step]


def draw(result: Mapping[str, Any], picture: Path) -> None:
    """Save the picture of a result of learning_curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.family": "DejaVu Sans", "font.size": 9.5, "text.color": INK})
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), dpi=150)
    label = f"TRL {result['versions']['trl']}, mean ± 2 std ({len(result['peer'])} seeds)"
    shown: dict[str, Any] = {label: draw_peer(axes, band(result["peer"]))}
    for run, color in zip(result["ours"], itertools.cycle(OUR_COLORS), strict=False):
        steps, values = zip(*curve(run), strict=True)
        shown[f"lowpeak, seed {run['seed']}"] = axes.plot(steps, values, color=color, linewidth=1.8)[0]
    dress(axes, result)
    axes.legend(shown.values(), shown.keys(), frameon=False, loc="lower right")
    figure.tight_layout()
    save(figure, picture)
    pyplot.close(figure)


def draw_peer(axes: Any, points: Sequence[tuple[int, float, float]]) -> tuple[Any, Any]:
    """The peer's mean and its band; both, for the legend."""
    steps, means, spreads = zip(*points, strict=True)
    low = [max(0.0, m - s) for m, s in zip(means, spreads, strict=True)]
    high = [min(1.0, m + s) for m, s in zip(means, spreads, strict=True)]
    area = axes.fill_between(steps, low, high, color=PEER_COLOR, alpha=0.2, linewidth=0)
    return area, axes.plot(steps, means, color=PEER_COLOR, linewidth=1.3)[0]


def save(figure: Any, picture: Path) -> None:
    """Write the figure as a PNG of few colours."""
    from PIL import Image  # matplotlib needs it, too

    with io.BytesIO() as buffer:
        figure.savefig(buffer, format="png")
        Image.open(buffer).convert("RGB").quantize(PALETTE).save(picture, optimize=True)


def dress(axes: Any, result: Mapping[str, Any]) -> None:
    """Title, scales and legend."""
    title = f"{result['algorithm'].upper()} on noisy sort: 0.5M parameters, 256 completions a step, one CPU core"
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.set_xlabel("optimizer step", color=INK)
    axes.set_ylabel("held-out accuracy, sampled", color=INK)
    axes.set_xlim(0, result["steps"])
    axes.set_ylim(0, 1)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)


if __name__ == "__main__":
    main()

"""Planned against measured memory: `python -m benchmarks.plan_accuracy [--quick] [--only NAMES] [--save FILE]`.

Each configuration of benchmarks.harness.plan_cases is planned by `lowpeak.plan.make_plan`, and run for three steps in a fresh
process on CPUs (two, over gloo, for DDP and FSDP2). Measured is what torch's allocator has given out, on any thread; of several
ranks the higher. What FILE has already is not run again. `--resident` measures resident memory, by the kernel's mark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness.forked import run_forked
from benchmarks.harness.plan_cases import CASES, QUICK, RESIDENT
from benchmarks.harness.planned import Case, measure_case, plan_case
from benchmarks.harness.process import SideError
from benchmarks.harness.report import print_result, require, versions
from benchmarks.plot_curve import GRID, INK, save
from lowpeak.plan.plan import PHASES

_LIMIT_S = 300
_AT_ONCE = 2
_COLORS = ("#9d1b32", "#dd4b39", "#f29e4c", "#30638e", "#3d9970", "#7b4fa3", "#333333")

Result = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="five configurations")
    parser.add_argument("--resident", action="store_true", help="resident memory, of a few configurations")
    parser.add_argument("--only", nargs="+", default=[], help="configurations by their names or groups")
    parser.add_argument("--replan", action="store_true", help="plan again what was measured before")
    parser.add_argument("--plot", type=Path, help="a picture of the ratios")
    parser.add_argument("--save", type=Path, help="results so far, to go on from")
    options = parser.parse_args()
    names = QUICK if options.quick else RESIDENT if options.resident else [case.name for case in CASES]
    wanted = set(options.only or names)
    cases = [case for case in CASES if case.name in names and wanted & {case.name, case.group}]
    found: dict[str, Result] = json.loads(options.save.read_text()) if options.save and options.save.exists() else {}
    missing = [case for case in cases if (case.name in found) == options.replan]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        compared = pool.map(lambda case: _try(case, options.resident, found.get(case.name)), missing)
        for case, result in zip(missing, compared, strict=True):
            print(case.name, "|", _summary(result), flush=True)
            if "error" not in result:
                found[case.name] = result
                if options.save:
                    options.save.write_text(json.dumps(found))
    results = [found[case.name] for case in cases if case.name in found]
    print(resident_table(found, cases) if options.resident else table(results))
    if options.plot:
        require("matplotlib", "pip install '.[plot]'")
        draw(results, options.plot)
    print_result({"benchmark": "plan_accuracy", "configurations": len(results), "versions": versions()})
    if len(results) < len(cases):
        sys.exit(1)


def compare(case: Case, resident: bool = False, before: Result | None = None) -> dict[str, Any]:
    """Return the planned phases of a case, and the measured peak of each phase, of several ranks the higher.

    `before` is an earlier result, whose measured peaks are taken.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run_forked(plan_case, (case, place / "plan.json"), place, 1, _LIMIT_S)
        plan = json.loads((place / "plan.json").read_text())
        if before is not None:
            return {**before, "planned": plan}
        run_forked(measure_case, (case, place, resident), place, case.ranks, _LIMIT_S)
        ranks = [json.loads((place / f"measured{rank}.json").read_text()) for rank in range(case.ranks)]
    return {
        "group": case.group,
        "planned": plan,
        "measured": {name: max(rank[name] for rank in ranks) for name in ranks[0]},
    }


def ratios(result: Result) -> dict[str, float]:
    """Return planned over measured bytes of the phases that both have."""
    planned, measured = result["planned"], result["measured"]
    return {name: planned[name] / measured[name] for name in PHASES if name in planned and name in measured}


def table(results: Sequence[Result]) -> str:
    """Return ratios by phase and by group of configurations, as a table in Markdown."""
    lines = ["|  | number | median | 5 % | 95 % | lowest | highest |", "| -- | -- | -- | -- | -- | -- | -- |"]
    for name in PHASES:
        lines += _row(name, [ratios(result)[name] for result in results if name in ratios(result)])
    for group in dict.fromkeys(result["group"] for result in results):
        lines += _row(group, [x for result in results if result["group"] == group for x in ratios(result).values()])
    lines += _row("all", [x for result in results for x in ratios(result).values()])
    return "\n".join(lines)


def resident_table(found: Mapping[str, Result], cases: Sequence[Case]) -> str:
    """Return MB above the phase "load", planned / measured, of each configuration and phase, as a table in Markdown."""
    names = PHASES[1:]
    lines = ["|  | " + " | ".join(names) + " |", "| -- |" + " -- |" * len(names)]
    for case in cases:
        planned, measured = (found[case.name][key] for key in ("planned", "measured"))
        cells = [
            f"{(planned[name] - planned['load']) / 1e6:.0f} / {(measured[name] - measured['load']) / 1e6:.0f}"
            if name in measured and name in planned
            else ""
            for name in names
        ]
        lines.append(f"| {case.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(results: Sequence[Result], picture: Path) -> None:
    """Draw the ratio of each phase of each configuration, a column for each phase, coloured by group."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), dpi=120, layout="constrained")
    panel: Any = figure.subplots()
    groups = list(dict.fromkeys(result["group"] for result in results))
    for number, group in enumerate(groups):
        found = [ratios(result) for result in results if result["group"] == group]
        points = [(at, of[name]) for of in found for at, name in enumerate(PHASES) if name in of]
        shift = 0.7 * (number / max(1, len(groups) - 1) - 0.5)
        x = [at + shift + 0.04 * (index % 3 - 1) for index, (at, _) in enumerate(points)]
        panel.scatter(
            x, [ratio for _, ratio in points], s=7, color=_COLORS[number % len(_COLORS)], label=group, alpha=0.7
        )
    for level in (0.98, 1.0, 1.02):
        panel.axhline(level, color=INK if level == 1 else GRID, linewidth=0.6, zorder=0)
    panel.set_xticks(range(len(PHASES)), PHASES, fontsize=8, color=INK)
    panel.set_ylabel("planned / measured", fontsize=8, color=INK)
    panel.tick_params(labelsize=8)
    figure.legend(loc="outside lower center", ncols=len(groups), fontsize=8, frameon=False)
    save(figure, picture)


def _row(name: str, values: Sequence[float]) -> list[str]:
    if not values:
        return []
    ordered = sorted(values)
    last = len(ordered) - 1
    numbers = (
        statistics.median(ordered),
        ordered[round(0.05 * last)],
        ordered[round(0.95 * last)],
        ordered[0],
        ordered[-1],
    )
    return [f"| {name} | {len(values)} |" + "".join(f" {value:.3f} |" for value in numbers)]


def _try(case: Case, resident: bool, before: Result | None) -> dict[str, Any]:
    try:
        return compare(case, resident, before)
    except SideError as error:
        return {"error": str(error)}


def _summary(result: Result) -> str:
    if "error" in result:
        return str(result["error"])
    return " ".join(f"{name} {ratio:.3f}" for name, ratio in ratios(result).items())


if __name__ == "__main__":
    main()

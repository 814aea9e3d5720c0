"""The figures of a report: curves of several runs, and each run's time and memory by phase."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lowpeak.report.run_data import RunData

Row = Mapping[str, Any]
Figure = dict[str, Any]

_CURVES = {
    "Reward": r"(eval_\w*)?(min_|mean_|max_)?reward",
    "Reward functions": r"rewards/.*/mean",
    "Accuracy": r".*accurac(y|ies)",
    "KL": r"(.*/)?kl|.*/approxkl_avg",
    "Entropy": r"(.*/)?entropy(_avg)?",
    "Completion length": r"completions/(min|mean|max)_length",
    "Truncated completions": r"completions/clipped_ratio",
    "Learning rate": r"learning_rate",
    "Loss": r"(eval_\w*)?loss",
    "Gradient norm": r"grad_norm",
    "Engine-trainer mismatch": r"sampling/sampling_logp_difference/mean",
    "Tokens per second": r"tokens_per_second",
}
_NOT_METRICS = r"step|epoch|step_time|memory_limit|(time|peak_memory|reserved_memory|planned_memory)/.*"
_COLORS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#7f7f7f")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_LIMIT = "#c00000"
_BETWEEN_STEPS = ("evaluate", "save")


def curve_figures(runs: Sequence[RunData]) -> list[Figure]:
    """Return a figure of each kind of curve in the runs, with all runs in it."""
    names = _metric_names(runs)
    chosen = {title: [name for name in names if re.fullmatch(pattern, name)] for title, pattern in _CURVES.items()}
    return [_curves(title, found, runs) for title, found in chosen.items() if found]


def other_figures(runs: Sequence[RunData]) -> list[Figure]:
    """Return a figure of each metric that `curve_figures` has not."""
    shown = "|".join([*_CURVES.values(), _NOT_METRICS])
    return [_curves(name, [name], runs) for name in _metric_names(runs) if not re.fullmatch(shown, name)]


def phase_figures(runs: Sequence[RunData]) -> list[Figure]:
    """Return each run's seconds and peak memory by phase, with the plan and the limit if the journal has them."""
    return [figure for run in runs for figure in (_times(run), _memory(run)) if figure is not None]


def phase_table(run: RunData) -> list[list[str]]:
    """Return a row of texts per phase: name, mean seconds, share of all time, peak, plan, and the peak's share of the limit."""
    phases = _phases(run, "time", "peak_memory", "planned_memory")
    total = sum(second for phase in phases for second in _values(run.steps, f"time/{phase}"))
    rows = []
    for phase in phases:
        seconds = _values(run.steps, f"time/{phase}")
        spent = sum(seconds) if seconds else None
        peak, planned, limit = (
            max(_values(run.steps, name), default=None)
            for name in (f"peak_memory/{phase}", f"planned_memory/{phase}", "memory_limit")
        )
        columns = (
            (_ratio(spent, len(seconds)), "{:.3g} s".format),
            (_ratio(spent, total), "{:.1%}".format),
            (peak, _size),
            (planned, _size),
            (_ratio(peak, limit), "{:.1%}".format),
        )
        rows.append([phase, *("" if value is None else show(value) for value, show in columns)])
    return rows


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _curves(title: str, names: Sequence[str], runs: Sequence[RunData]) -> Figure:
    traces: list[Row] = []
    for run, color in zip(runs, itertools.cycle(_COLORS), strict=False):
        for name, dash in zip(names, itertools.cycle(_DASHES), strict=False):
            rows = run.evaluations if name.startswith("eval_") else run.steps
            label = " ".join([run.name] * (len(runs) > 1) + [name] * (len(names) > 1)) or name
            traces += _line(rows, name, label, {"color": color, "dash": dash})
    events = [
        {"type": "line", "x0": event["step"], "x1": event["step"], "yref": "paper", "y0": 0, "y1": 1}
        | {"line": {"color": color, "dash": "dot", "width": 1}}
        for run, color in zip(runs, itertools.cycle(_COLORS), strict=False)
        for event in run.events
    ]
    return _figure(title, traces, shapes=events)


def _times(run: RunData) -> Figure | None:
    """Return a figure of the phases within a step, which evaluations and saves are not."""
    phases = [phase for phase in _phases(run, "time") if phase not in _BETWEEN_STEPS]
    traces = [
        trace | {"stackgroup": "time"}
        for phase, color in zip(phases, itertools.cycle(_COLORS), strict=False)
        for trace in _line(run.steps, f"time/{phase}", phase, {"color": color, "width": 1})
    ]
    traces += _line(run.steps, "step_time", "whole step", {"color": "#000000", "width": 1})
    return _figure(f"{run.name}: seconds of a step", traces) if traces else None


def _memory(run: RunData) -> Figure | None:
    phases = _phases(run, "peak_memory", "planned_memory")
    peaks = [
        value
        for name in ("peak_memory", "planned_memory")
        for p in phases
        for value in _values(run.steps, f"{name}/{p}")
    ]
    unit, factor = ("GiB", 1 << 30) if max(peaks, default=0) >= 1 << 30 else ("MiB", 1 << 20)
    traces: list[dict[str, Any]] = []
    for phase, color in zip(phases, itertools.cycle(_COLORS), strict=False):
        traces += _line(run.steps, f"peak_memory/{phase}", phase, {"color": color}, factor)
        planned = {"color": color, "dash": "dash"}
        traces += _line(run.steps, f"planned_memory/{phase}", f"{phase}, planned", planned, factor)
    traces += _line(run.steps, "memory_limit", "limit", {"color": _LIMIT, "dash": "dot"}, factor)
    return _figure(f"{run.name}: peak memory in {unit}", traces) if traces else None


def _line(
    rows: Iterable[Row], name: str, label: str, line: Mapping[str, Any], factor: float = 1
) -> Iterator[dict[str, Any]]:
    """Yield the trace of a metric; none if no row has it."""
    points = [(row["step"], row[name] / factor) for row in rows if name in row]
    if points:
        x, y = zip(*points, strict=True)
        # plotly reads tags in labels: names stand there as they are.
        shown = {"name": html.escape(label, quote=False), "line": dict(line)}
        yield {"type": "scatter", "x": x, "y": y, "mode": "lines" if len(x) > 1 else "markers", **shown}


def _figure(title: str, traces: Sequence[Row], shapes: Sequence[Row] = ()) -> Figure:
    """Return a figure as JSON, checked by plotly."""
    import plotly.graph_objects as plotly

    layout = {
        "title": {"text": html.escape(title, quote=False), "font": {"size": 14}},
        "xaxis": {"title": {"text": "step", "standoff": 2, "font": {"size": 11}}, "gridcolor": "#e8e8e8"},
        "yaxis": {"gridcolor": "#e8e8e8", "zerolinecolor": "#c8c8c8"},
        "margin": {"l": 55, "r": 15, "t": 35, "b": 90},
        "height": 330,
        "showlegend": len(traces) > 1 or any(trace["name"] != html.escape(title, quote=False) for trace in traces),
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "font": {"size": 11}},
        "template": "none",
        "shapes": shapes,
    }
    checked: Figure = plotly.Figure(data=traces, layout=layout).to_plotly_json()
    return checked


def _metric_names(runs: Sequence[RunData]) -> list[str]:
    rows = (row for run in runs for row in (*run.steps, *run.evaluations))
    return [*dict.fromkeys(name for row in rows for name in row)]


def _phases(run: RunData, *kinds: str) -> list[str]:
    names = dict.fromkeys(name for row in run.steps for name in row)
    return [
        *dict.fromkeys(phase for kind, _, phase in (name.partition("/") for name in names) if kind in kinds and phase)
    ]


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"

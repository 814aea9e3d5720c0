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
    "Staleness of tokens in steps": r"staleness/(mean|max)",
    "Effective sample size": r"(eval_)?sampling/effective_sample_size",
    "Idle shares of servers and trainer": r"idle/(servers|trainer)",
    "Seconds of rollouts ahead": r"time/(generate|wait_rollout)",
}
_NOT_METRICS = r"step|epoch|step_time|hours|memory_limit|(time|peak_memory|reserved_memory|planned_memory)/.*"
# Of equal lightness: on white and on black.
_COLORS = ("#3b82f6", "#e8710a", "#22a06b", "#a855f7", "#e5484d", "#0ea5b7", "#d946a0", "#a16207")
_WHOLE = "#84858c"
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_LIMIT = "#c00000"
_NOT_IN_STEP = ("evaluate", "save", "generate", "wait_rollout")  # between steps, in the background, or part of rollout


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
    numbered = list(enumerate(runs))
    return [each for index, run in numbered for each in (_times(index, run), _memory(index, run)) if each is not None]


def phase_table(run: RunData) -> list[list[str]]:
    """Return a row of texts per phase: name, mean seconds, share of all time, peak, plan, and the peak's share of the limit."""
    phases = [each for each in _phases(run, "time", "peak_memory", "planned_memory") if each not in _NOT_IN_STEP[2:]]
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
    """Return a figure with a colour by run, or for one run by metric."""
    traces: list[Row] = []
    for index, run in enumerate(runs):
        for number, name in enumerate(names):
            rows = run.evaluations if name.startswith("eval_") else run.steps
            label = " ".join([run.name] * (len(runs) > 1) + [name] * (len(names) > 1)) or name
            color = _COLORS[(index if len(runs) > 1 else number) % len(_COLORS)]
            dash = _DASHES[number % len(_DASHES)] if len(runs) > 1 else "solid"
            traces += _line(index, rows, name, label, {"color": color, "dash": dash})
    events = [
        {"type": "line", "x0": event["step"], "x1": event["step"], "yref": "paper", "y0": 0, "y1": 1}
        | {"line": {"color": color, "dash": "dot", "width": 1}, "name": str(index)}
        for index, (run, color) in enumerate(zip(runs, itertools.cycle(_COLORS), strict=False))
        for event in run.events
    ]
    return _figure(title, traces, shapes=events)


def _times(index: int, run: RunData) -> Figure | None:
    """Return a figure of the phases within a step."""
    phases = [phase for phase in _phases(run, "time") if phase not in _NOT_IN_STEP]
    traces = [
        trace | {"stackgroup": "time"}
        for phase, color in zip(phases, itertools.cycle(_COLORS), strict=False)
        for trace in _line(index, run.steps, f"time/{phase}", phase, {"color": color, "width": 1})
    ]
    traces += _line(index, run.steps, "step_time", "whole step", {"color": _WHOLE, "width": 1})
    return _figure(f"{run.name}: seconds of a step", traces) if traces else None


def _memory(index: int, run: RunData) -> Figure | None:
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
        traces += _line(index, run.steps, f"peak_memory/{phase}", phase, {"color": color}, factor)
        planned = {"color": color, "dash": "dash"}
        traces += _line(index, run.steps, f"planned_memory/{phase}", f"{phase}, planned", planned, factor)
    traces += _line(index, run.steps, "memory_limit", "limit", {"color": _LIMIT, "dash": "dot"}, factor)
    return _figure(f"{run.name}: peak memory in {unit}", traces) if traces else None


def _line(
    index: int, rows: Iterable[Row], name: str, label: str, line: Mapping[str, Any], factor: float = 1
) -> Iterator[dict[str, Any]]:
    """Yield the trace of a metric of run number `index`, by steps; none if no row has it."""
    points = [(row["step"], float(f"{row[name] / factor:.6g}")) for row in rows if name in row]
    if points:
        x, y = zip(*points, strict=True)
        # plotly reads tags in labels: names stand there as they are.
        shown = {"name": html.escape(label, quote=False), "line": dict(line), "meta": index}
        yield {"type": "scatter", "x": x, "y": y, "mode": "lines" if len(x) > 1 else "markers", **shown}


def _figure(title: str, traces: Sequence[Row], shapes: Sequence[Row] = ()) -> Figure:
    """Return a figure as JSON, checked by plotly."""
    import plotly.graph_objects as plotly

    layout = {
        "title": {"text": html.escape(title, quote=False), "font": {"size": 14}},
        "xaxis": {"title": {"text": "step", "standoff": 2, "font": {"size": 11}}},
        "yaxis": {"exponentformat": "e"},
        "margin": {"l": 55, "r": 15, "t": 35, "b": 90 if len(traces) <= 4 else 120},
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

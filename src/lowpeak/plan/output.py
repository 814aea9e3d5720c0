"""A plan as a table, as JSON and as a page with a plot, and a fit's explanation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lowpeak.memory import Kind
from lowpeak.plan.advice import Advice
from lowpeak.plan.fit import Fit
from lowpeak.plan.hardware import GIB
from lowpeak.plan.plan import Plan


def print_plan(plan: Plan, advice: Sequence[Advice] = (), console: Console | None = None) -> None:
    """Print a row per phase, the phase that peaks, and what would lower the peak."""
    console = console or Console(width=None if Console().is_terminal else 160)
    console.print(plan_table(plan))
    for line in summary(plan, advice):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def plan_table(plan: Plan) -> Table:
    """Return the table: what is alive in each phase, in GiB, the peak, and the distance to the limit."""
    kinds = [kind for kind in Kind if any(phase.device.get(kind) for phase in plan.phases.values())]
    table = Table(title=_title(plan))
    table.add_column("phase")
    for name in (*kinds, "peak", "free", "host", ""):
        table.add_column(str(name), justify="right")
    for name, phase in plan.phases.items():
        values = [_gib(phase.device.get(kind, 0)) for kind in kinds]
        free = f"{(plan.request.machine.memory - phase.peak) / GIB:.1f}"
        table.add_row(name, *values, f"{phase.peak / GIB:.1f}", free, f"{phase.host_peak / GIB:.1f}", phase.source)
    return table


def _title(plan: Plan) -> str:
    machine = plan.request.machine
    devices = "device" if machine.num_devices == 1 else "devices"
    where = f"{machine.num_devices} {devices} of {machine.memory / GIB:.0f} GiB"
    return f"{plan.request.kind}, {_millions(plan.counts.total)} parameters, {plan.request.strategy} on {where}: GiB per device"


def _millions(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 10**8 else f"{number / 1e6:.2f}M"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes >= GIB // 200 else ""


def summary(plan: Plan, advice: Sequence[Advice]) -> list[str]:
    """Return the plan in words: whether it fits, its sizes, its time, and the advice."""
    machine, peak = plan.request.machine, plan.peak / GIB
    verdict = "fits" if plan.fits else "does not fit"
    lines = [f"The run {verdict}: {plan.peak_phase} takes {peak:.1f} of {machine.memory / GIB:.1f} GiB on each device."]
    processes = machine.devices_on_host
    host = (
        f"Host memory: {plan.host_peak / GIB:.1f} GiB for {processes} process{'es' if processes > 1 else ''} of a host"
    )
    lines.append(f"{host}{'' if machine.host_memory is None else f', of {machine.host_memory / GIB:.0f}'}.")
    sizes = ", ".join(f"{name}={value}" for name, value in plan.sizes.items())
    lines.append(f"Sizes: {sizes}; micro-batches a step: {plan.num_batches}, the largest of {plan.tokens:,} tokens.")
    seconds = ", ".join(f"{phase} {value:.2g}" for phase, value in plan.seconds.items())
    lines.append(f"A step takes about {sum(plan.seconds.values()):.2g} s by the cost model ({seconds}).")
    if advice:
        lines.append(f"What lowers the peak of {peak:.1f} GiB most:")
    lines += [
        f"  {each.setting}: about {each.peak / GIB:.1f} GiB, {each.added_seconds:+.2g} s a step" for each in advice
    ]
    computed = [name for name, phase in plan.phases.items() if phase.source == "computed"]
    lines.append(
        f"Rehearsed on fake tensors: {', '.join(name for name in plan.phases if name not in computed) or 'none'}; "
        f"computed by arithmetic: {', '.join(computed) or 'none'}. Every completion is planned at its full length."
    )
    return lines


def fit_lines(fit: Fit) -> list[str]:
    """Return what a search chose and why, or what would make the run fit."""
    lines = []
    if fit.candidate is None:
        lines.append(f"No setting fits. {fit.smallest_change}")
    else:
        chosen = ", ".join(f"{name}={value}" for name, value in fit.arguments.items())
        lines.append(f"Chosen: {fit.candidate} ({chosen}).")
    lines += [f"  rejected: {candidate}: {reason}" for candidate, reason in fit.rejected]
    return lines


def write_plot(plan: Plan, path: Path) -> None:
    """Write a self-contained HTML page: stacked bars of the phases by kind, and the device's limit."""
    import plotly.graph_objects as go

    names = list(plan.phases)
    figure: Any = go.Figure()
    for kind in Kind:
        values = [plan.phases[name].device.get(kind, 0) / GIB for name in names]
        if any(values):
            figure.add_bar(name=str(kind), x=names, y=values)
    limit = plan.request.machine.memory / GIB
    figure.add_hline(y=limit, line_dash="dash", annotation_text=f"device memory {limit:.0f} GiB")
    figure.update_layout(barmode="stack", title=_title(plan), yaxis_title="GiB per device")
    figure.write_html(path, include_plotlyjs=True)

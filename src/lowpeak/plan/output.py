"""A plan as a table, as JSON and as a page with a plot, and a fit's explanation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lowpeak.arguments import byte_unit, show_bytes, show_seconds
from lowpeak.memory import Kind
from lowpeak.plan.advice import Advice
from lowpeak.plan.computed import engine_memory, vllm_bytes
from lowpeak.plan.device_split import DeviceSplit
from lowpeak.plan.fit import Fit
from lowpeak.plan.plan import Plan

_LONG_STEP = 600.0  # seconds, above which other settings are worth a search
_MOST_ALTERNATIVES = 5
_MUCH_ON_HOST = 8 << 30  # bytes of tensors that a run moves to a host


def print_plan(plan: Plan, advice: Sequence[Advice] = (), hourly_price: float | None = None) -> None:
    """Print a row per phase, the highest phase, minutes and dollars, and advice that lowers the peak."""
    console = Console(width=None if Console().is_terminal else 160)
    console.print(plan_table(plan))
    for line in summary(plan, advice, hourly_price):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def plan_table(plan: Plan) -> Table:
    """Return the table: bytes by phase and kind, the peak, and the distance to the limit."""
    _, unit = byte_unit(plan.peak)
    kinds = [kind for kind in Kind if any(phase.device.get(kind) for phase in plan.phases.values())]
    table = Table(title=_title(plan))
    table.add_column("phase")
    for name in (*kinds, "peak", "free", "host", ""):
        table.add_column(str(name), justify="right")
    for name, phase in plan.phases.items():
        values = [phase.device.get(kind, 0) / unit for kind in kinds]
        totals = (phase.peak, plan.request.machine.memory - phase.peak, phase.host_peak)
        shown = (f"{value:.2f}" if value >= 0.005 else "" for value in values)
        table.add_row(name, *shown, *(f"{total / unit:.1f}" for total in totals), phase.source)
    return table


def _title(plan: Plan) -> str:
    machine = plan.request.machine
    devices = "device" if machine.num_devices == 1 else "devices"
    where = f"{machine.num_devices} {devices} of {show_bytes(machine.memory)}"
    model = f"{_millions(plan.counts.total)} parameters"
    return f"{plan.request.kind}, {model}, {plan.request.strategy} on {where}: {byte_unit(plan.peak)[0]} per device"


def _millions(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 10**8 else f"{number / 1e6:.2f}M"


def summary(plan: Plan, advice: Sequence[Advice], hourly_price: float | None = None) -> list[str]:
    """Return the plan in words: whether it fits, its sizes, its time and price, and the advice."""
    memory, peak = plan.request.machine.memory, show_bytes(plan.peak)
    verdict = "fits on each device" if plan.peak <= memory else "does not fit on a device"
    lines = [f"The run {verdict}: {plan.peak_phase} takes {peak} of {show_bytes(memory)}."]
    # What does not fit stands first.
    lines.insert(0 if plan.host_excess else 1, host_line(plan))
    sizes = ", ".join(f"{name}={value}" for name, value in plan.sizes.items())
    lines.append(f"Sizes: {sizes}; micro-batches a step: {plan.num_batches}, the largest of {plan.tokens:,} tokens.")
    generation = f"Generation: {plan.inputs.generation}. " if plan.inputs.generation else ""
    lines.append(f"{generation}Layout: {plan.inputs.layout_choice}.")
    if plan.request.quantized_bits and plan.counts.expert_bytes:
        lines.append(
            f"Of the quantised model {show_bytes(plan.counts.expert_bytes)} are experts, which stay as they are."
        )
    lines += _server_lines(plan)
    lines += [_step_line(plan), _duration_line(plan, hourly_price)]
    if advice:
        lines.append(f"What lowers the peak of {peak} most:")
    lines += [
        f"  {each.setting}: about {show_bytes(each.peak)}, {_added(each.added_seconds)}{each.note}" for each in advice
    ]
    return [*lines, _sources_line(plan)]


def _server_lines(plan: Plan) -> list[str]:
    """Return a line about the vLLM servers of a run: their number, and the memory of each."""
    inputs = plan.inputs
    vllm = inputs.settings.vllm if inputs.is_online else None
    if vllm is None or inputs.colocated is not None:
        return []
    engine, number = engine_memory(inputs), len(vllm.where.base_urls)
    devices = "1 device" if engine.parallel == 1 else f"{engine.parallel} devices"
    weights = show_bytes(vllm_bytes(plan.counts.total, engine.parallel))
    return [
        f"Servers: {number}, each planned on {devices} of {show_bytes(plan.request.machine.total)}, with {weights} of weights and "
        f"context and {show_bytes(engine.cache_bytes or 0)} of KV cache on each."
    ]


def _step_line(plan: Plan) -> str:
    seconds = ", ".join(f"{phase} {show_seconds(value)}" for phase, value in plan.seconds.items())
    step = plan.step_seconds
    overlap = "; rollouts are generated while the policy trains" if plan.work.overlaps else ""
    words = f"A step takes about {show_seconds(step)} by the cost model ({seconds}{overlap})."
    return words if step < _LONG_STEP else f"{words} `lowpeak plan --fit` looks for settings that are faster."


def _added(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{show_seconds(abs(seconds))} a step"


def _duration_line(plan: Plan, hourly_price: float | None) -> str:
    cost = ""
    if hourly_price is not None:
        cost = f" and cost {plan.dollars(hourly_price):.2f} dollars at {hourly_price:g} an hour for all GPUs"
    return (
        f"{plan.planned_steps:,} steps take about {show_seconds(60 * plan.minutes)}{cost}, without start and evaluation; "
        f"{plan.tokens_per_second:,.0f} tokens per second."
    )


def _sources_line(plan: Plan) -> str:
    """Return which phases of the plan were rehearsed, which computed, and for which lengths."""
    computed = [name for name, phase in plan.phases.items() if phase.source == "computed"]
    return (
        f"Rehearsed on fake tensors: {', '.join(name for name in plan.phases if name not in computed) or 'none'}; "
        f"computed by arithmetic: {', '.join(computed) or 'none'}. Every sequence is planned with a prompt of "
        f"{plan.inputs.request.prompt_tokens:,} tokens (--prompt_tokens) and {plan.inputs.completion_tokens:,} after it."
    )


def host_line(plan: Plan) -> str:
    """Return the host memory of a plan in words; beyond the limit also the excess and its largest cause."""
    machine, processes = plan.request.machine, plan.request.machine.devices_on_host
    words = f"{show_bytes(plan.host_peak)} for {processes} process{'es' if processes > 1 else ''} of a host"
    if machine.host_memory is not None:
        words += f", of {show_bytes(machine.host_memory)}"
    if not plan.host_excess:
        return f"Host memory: {words}."
    kinds = plan.host_kinds
    largest = max(kinds, key=lambda kind: kinds[kind])
    return (
        f"The run does not fit in host memory: {words}, {show_bytes(plan.host_excess)} too much; "
        f"most of it, {show_bytes(kinds[largest])}, is {_host_cause(plan, largest)}."
    )


def _host_cause(plan: Plan, kind: Kind) -> str:
    """Return the cause of a kind of host memory, with the setting that changes it."""
    if kind == Kind.MARGIN:
        return "the processes themselves (--gpus_per_host sets their number)"
    if kind == Kind.CHECKPOINT:
        return "the checkpoint of --model, which one process reads for its host"
    if kind == Kind.BUCKETS:
        return "the slices of weights that are saved"
    if kind == Kind.FROZEN:
        return "frozen models, by offload_frozen_models"
    if kind == Kind.TEACHER:
        return "the teacher's hidden states of a step"
    if plan.request.sharding.on_host:
        return f"{kind}, by the offload of --accelerate_config"
    offload = plan.inputs.storage is not None and plan.inputs.storage.offload
    return f"{kind}, by {'offload_optimizer' if offload else 'offload_during_rollout'}"


def fit_lines(fit: Fit, hourly_price: float | None = None) -> list[str]:
    """Return a search's choice with its plan and the nearest alternatives, or changes that would make the run fit."""
    lines = []
    if fit.plan is None:
        lines.append(f"No setting fits. {fit.smallest_change}")
    else:
        chosen = ", ".join(f"{name}={value}" for name, value in fit.arguments.items())
        lines.append(f"Chosen: {fit.candidate} ({chosen}).")
        lines += [*summary(fit.plan, (), hourly_price), *_split_lines(fit.split), *_unchecked_host(fit.plan)]
    rejected = [f"  rejected: {candidate}: {reason}" for candidate, reason in fit.rejected]
    lines += rejected[:_MOST_ALTERNATIVES]
    if len(rejected) > _MOST_ALTERNATIVES:
        lines.append(f"  and {len(rejected) - _MOST_ALTERNATIVES} more, which --format json lists")
    return lines


def _split_lines(split: DeviceSplit | None) -> list[str]:
    """Return how many devices should serve, and whether other constants of the cost model change that."""
    if split is None:
        return []
    (least, most), fastest = split.range, split.fastest
    words = f"Of {split.devices} devices {fastest} should serve and {split.devices - fastest} train: "
    words += f"{show_seconds(split.seconds[fastest])} a step"
    if fastest != split.current and split.current in split.seconds:
        words += f", with {split.current} servers as given {show_seconds(split.seconds[split.current])}"
    around = "half to twice the cost model's constants, which no GPU has confirmed"
    if least == most:
        return [f"{words}. This holds over {around}."]
    return [
        f"{words}.",
        f"Warning: over {around}, the fastest number is from {least} to {most}: measure a few steps of each.",
    ]


def _unchecked_host(plan: Plan) -> list[str]:
    """Return a line that asks for the host's memory, if the run moves tensors there and it is unknown."""
    if plan.request.machine.host_memory is not None:
        return []
    moved = sum(value for kind, value in plan.host_kinds.items() if kind not in (Kind.MARGIN, Kind.CHECKPOINT))
    if moved < _MUCH_ON_HOST:
        return []
    return [f"Each host needs {show_bytes(plan.host_peak)} of memory, which was not checked: give --host_memory."]


def write_plot(plan: Plan, path: Path) -> None:
    """Write a self-contained HTML page: stacked bars of the phases by kind, and the device's limit."""
    import plotly.graph_objects as go

    names = list(plan.phases)
    unit, size = byte_unit(plan.peak)
    figure: Any = go.Figure()
    for kind in Kind:
        values = [plan.phases[name].device.get(kind, 0) / size for name in names]
        if any(values):
            figure.add_bar(name=str(kind), x=names, y=values)
    limit = plan.request.machine.memory
    figure.add_hline(y=limit / size, line_dash="dash", annotation_text=f"device memory {show_bytes(limit)}")
    figure.update_layout(barmode="stack", title=_title(plan), yaxis_title=f"{unit} per device")
    figure.write_html(path, include_plotlyjs=True)

"""The head of a report: model, data, arguments, time and result; a column for each run."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowpeak.report.run_data import RunData, time_text

# Of each, the first that a run has.
_TRAINED = ("reward", "loss")
_EVALUATED = (r"eval_(\w+_)?accuracy", r"eval_(\w+_)?reward", r"eval_(\w+_)?loss")


def header_rows(runs: Sequence[RunData]) -> list[list[str]]:
    """Return rows of a name and a text for each run, without rows that are empty for all."""
    columns = [dict(_facts(run)) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return [row for row in rows if any(row[1:])]


def argument_rows(runs: Sequence[RunData]) -> list[list[str]]:
    """Return rows of an argument that a run sets, and its value in each run (empty: the default); first those that differ."""
    columns = [_mapping(run.facts.get("arguments")) for run in runs]
    rows = [[name, *(str(column.get(name, "")) for column in columns)] for name in sorted(set().union(*columns))]
    return sorted(rows, key=lambda row: len({*row[1:]}) == 1)


def _facts(run: RunData) -> Iterator[tuple[str, str]]:
    facts, versions = run.facts, _mapping(run.facts.get("versions"))
    yield "algorithm", str(facts.get("algorithm", ""))
    yield "model", str(facts.get("model", ""))
    rows = f"{facts['rows']:,} rows" if type(facts.get("rows")) is int else ""
    yield "data", ", ".join(filter(None, [str(facts.get("data", "")), rows]))
    names = facts.get("rewards")
    yield "rewards", ", ".join(map(str, names if isinstance(names, list) else ()))
    yield "hardware", _hardware(facts)
    yield "last start", time_text(facts.get("time"))
    yield "steps", f"{run.num_steps:,}"
    tokens = run.steps[-1].get("num_tokens") if run.steps else None
    yield "tokens", "" if tokens is None else f"{tokens:,.0f}"
    yield "time of steps", _duration(run.seconds) if run.seconds else ""
    yield from _results(run)
    yield "versions", ", ".join(f"{name} {number}" for name, number in versions.items())


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"


def _hardware(facts: Mapping[str, Any]) -> str:
    if "device" not in facts:
        return ""
    memory = facts.get("device_memory")
    size = f", {memory / 2**30:.0f} GiB each" if type(memory) is int and facts["device"] != "CPU" else ""
    return f"{facts.get('devices')} x {facts['device']}{size}"


def _results(run: RunData) -> Iterator[tuple[str, str]]:
    """Yield how the reward or the loss changed over the steps, and how evaluations did."""
    for rows, patterns, most in ((run.steps, _TRAINED, 10), (run.evaluations, _EVALUATED, 1)):
        names = dict.fromkeys(name for row in rows for name in row)
        found = ([name for name in names if re.fullmatch(pattern, name)] for pattern in patterns)
        for name in next(filter(None, found), []):
            yield name, _change([row[name] for row in rows if name in row], most)


def _change(values: Sequence[float], most: int) -> str:
    """Return the means of the first and of the last `most` values; the value, if there is one."""
    if len(values) == 1:
        return f"{values[0]:.4g}"
    means = f"{statistics.fmean(values[:most]):.4g} \u2192 {statistics.fmean(values[-most:]):.4g}"
    return means if most == 1 else f"{means} (means of the first and last {min(most, len(values))} steps)"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}

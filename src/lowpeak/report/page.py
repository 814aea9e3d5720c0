"""The HTML page of a report, and the file it is written to."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from lowpeak.errors import ArgumentError
from lowpeak.report.figures import curve_figures, other_figures, phase_figures, phase_table
from lowpeak.report.header import argument_rows, header_rows
from lowpeak.report.run_data import RunData, has_journal, read_runs

FILE_NAME = "report.html"

_AXES = {"step": "step", "tokens": "num_tokens", "hours": "hours"}
_PHASE_COLUMNS = ("phase", "mean time", "share", "peak memory", "planned", "of the limit")


def write_report(folders: Sequence[Path], output: Path | None = None, reload_seconds: float = 0.0) -> Path:
    """Write the report of runs into one file and return its path; None: `report.html` in the run, or here for several.

    With `reload_seconds` an open page loads itself again after that time.

    Raises:
        ArgumentError: a folder has no journal, or the file cannot be written.
    """
    if output is None:
        output = folders[0] / FILE_NAME if len(folders) == 1 else Path(FILE_NAME)
    if output.suffix not in (".html", ".htm"):
        raise ArgumentError(f"{output} does not end in .html: a report is an HTML page, so name such a file.")
    page, part = report_page(read_runs(folders), reload_seconds), output.with_name(f".{output.name}.part")
    try:
        part.write_bytes(page)
        part.replace(output)  # a browser that loads it now gets the old page or the new one
    except OSError as error:
        raise ArgumentError(
            f"Cannot write the report {output}: {error.strerror}; name a file in a folder that you can write."
        ) from error
    return output


def watch_report(folders: Sequence[Path], output: Path | None, seconds: float) -> Iterator[Path]:
    """Write the report again whenever a journal has grown, until Ctrl-C; the last page loads itself no more.

    The first one is written when each run has finished a step.
    """
    sizes: list[int] = []
    try:
        while True:
            before = sizes
            sizes = [path.stat().st_size for each in folders for path in (each / "journal").glob("*.jsonl")]
            if sizes != before and all(map(has_journal, folders)):
                yield write_report(folders, output, seconds)
            time.sleep(seconds)
    except KeyboardInterrupt:
        yield write_report(folders, output)


def report_page(runs: Sequence[RunData], reload_seconds: float = 0.0) -> bytes:
    """Return the page of some runs, which contains its scripts and data and loads nothing."""
    from plotly.offline import get_plotlyjs

    files = resources.files("lowpeak.report")
    parts = {"plotly": get_plotlyjs(), "script": (files / "page.js").read_text(encoding="utf-8")}
    assert not any(re.search(r"</script|<!--", script) for script in parts.values()), "a script would end early"
    parts["policy"] = _security_policy(parts["plotly"], parts["script"])
    parts["data"] = _embedded({"reload_seconds": reload_seconds, **_page_data(runs)})
    template = (files / "page.html").read_text(encoding="utf-8")
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)
    # A lone surrogate, which only JSON strings of a page can have, becomes its escape.
    return page.encode("utf-8", "backslashreplace")


def _page_data(runs: Sequence[RunData]) -> dict[str, Any]:
    return {
        "runs": [
            {
                "name": run.name,
                "summary": _summary(run),
                "axes": {name: [row.get(key) for row in run.steps] for name, key in _AXES.items()},
                "sampled": _sampled(run),
                "events": run.events,
                "phases": phase_table(run),
                "prompts": run.completions.prompts,
                "completions": run.completions.rows,
            }
            for run in runs
        ],
        "header": header_rows(runs),
        "arguments": argument_rows(runs),
        "phase_columns": _PHASE_COLUMNS,
        "curves": curve_figures(runs),
        "phases": phase_figures(runs),
        "others": other_figures(runs),
    }


def _summary(run: RunData) -> str:
    """Return the number of steps in the curves, if not all, and the quote; empty without both."""
    sampled = f" The curves have {len(run.steps)} of {run.num_steps} steps, evenly sampled." * (
        len(run.steps) < run.num_steps
    )
    summary = sampled + _beside_quote(run)
    return summary and f"{run.name}:{summary}"


def _beside_quote(run: RunData) -> str:
    """Return a sentence with the hours and dollars of the run's steps beside those that were quoted for them."""
    if run.quote is None or not run.seconds:
        return ""
    share, hours = run.num_steps / run.quote["steps"], run.seconds / 3600
    fast, slow = (share * each for each in run.quote["hours"])
    least, most = (share * each for each in run.quote["dollars"])
    return (
        f" Its steps took {hours:.2g} h, ${hours * run.quote['price_per_hour']:.2f}; quoted on {run.quote['gpu']} were "
        f"{fast:.2g} to {slow:.2g} h, ${least:.2f} to ${most:.2f}."
    )


def _sampled(run: RunData) -> str:
    """Return a sentence with the number of completions, and how many of them the page has."""
    shown, total = len(run.completions.rows), run.completions.num_total
    if not total:
        return f"{run.name}: the journal has no completions."
    number = f"all {total} completions" if shown == total else f"{shown} of {total} completions, evenly sampled"
    available, values = run.completions.num_available, sum("tokens" in row for row in run.completions.rows)
    tokens = f"all {values}" if values == available else f"{values} of {available}, evenly sampled"
    return f"{run.name}: the page has {number}; of those with token values in the journal it has {tokens}."


def _embedded(data: Any) -> str:
    """Return data as JSON that no HTML parser takes for markup."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _security_policy(*scripts: str) -> str:
    """Return a Content-Security-Policy that runs these scripts alone and loads nothing; plotly styles its figures inline."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    images = "data: blob:"  # of figures that are saved as PNG
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src {images}; base-uri 'none'; "
        "form-action 'none'"
    )

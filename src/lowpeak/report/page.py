"""The HTML page of a report, and the file it is written to."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from lowpeak.errors import ArgumentError
from lowpeak.report.figures import curve_figures, other_figures, phase_figures, phase_table
from lowpeak.report.run_data import RunData, read_runs

FILE_NAME = "report.html"

_PHASE_COLUMNS = ("phase", "mean time", "share", "peak memory", "planned", "of the limit")


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of runs into one file and return its path; None: `report.html` in the run, or here for several.

    Raises:
        ArgumentError: a folder has no journal, or the file cannot be written.
    """
    if output is None:
        output = folders[0] / FILE_NAME if len(folders) == 1 else Path(FILE_NAME)
    if output.suffix not in (".html", ".htm"):
        raise ArgumentError(f"{output} does not end in .html: a report is an HTML page, so name such a file.")
    page = report_page(read_runs(folders))
    try:
        output.write_bytes(page)
    except OSError as error:
        raise ArgumentError(
            f"Cannot write the report {output}: {error.strerror}; name a file in a folder that you can write."
        ) from error
    return output


def report_page(runs: Sequence[RunData]) -> bytes:
    """Return the page of some runs, which contains its scripts and data and may not load anything."""
    from plotly.offline import get_plotlyjs

    files = resources.files("lowpeak.report")
    parts = {"plotly": get_plotlyjs(), "script": (files / "page.js").read_text(encoding="utf-8")}
    assert not any(re.search(r"</script|<!--", script) for script in parts.values()), "a script would end early"
    parts["policy"] = _security_policy(parts["plotly"], parts["script"])
    parts["data"] = _embedded(_page_data(runs))
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
                "sampled": _sampled(run),
                "events": run.events,
                "phases": phase_table(run),
                "prompts": run.completions.prompts,
                "completions": run.completions.rows,
            }
            for run in runs
        ],
        "phase_columns": _PHASE_COLUMNS,
        "curves": curve_figures(runs),
        "phases": phase_figures(runs),
        "others": other_figures(runs),
    }


def _summary(run: RunData) -> str:
    """Return a sentence with the number of steps, and how many of them the curves have."""
    sampled = f" (the curves have {len(run.steps)} of them, evenly sampled)" if len(run.steps) < run.num_steps else ""
    return f"{run.name}: {run.num_steps} steps{sampled}.{_beside_quote(run)}"


def _beside_quote(run: RunData) -> str:
    """Return a sentence with the hours and dollars of the run's steps beside those that were quoted for them."""
    if run.quote is None or not run.seconds:
        return ""
    share, hours = run.num_steps / run.quote["steps"], run.seconds / 3600
    fast, slow = (share * each for each in run.quote["hours"])
    least, most = (share * each for each in run.quote["dollars"])
    return (
        f" They took {hours:.2g} h, ${hours * run.quote['price_per_hour']:.2f}; quoted on {run.quote['gpu']} were "
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

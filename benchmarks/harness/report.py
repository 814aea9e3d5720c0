"""The report of a benchmark: the peer that it needs, versions, statistics of a few seeds, and the last line."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from benchmarks.harness.process import ROOT

OURS = "lowpeak"
PEER = "trl"
SIDES = (OURS, PEER)  # the names that Python imports
_PACKAGES = (OURS, PEER, "torch", "transformers", "accelerate", "datasets")


def require(package: str, remedy: str) -> None:
    """Exit with status 2 and one sentence where `package` is not installed."""
    if importlib.util.find_spec(package) is None:
        print(f"{package} is not installed, and this command needs it: {remedy}.", file=sys.stderr)
        raise SystemExit(2)


def require_peer() -> None:
    """Exit with status 2 where TRL, with which lowpeak is compared, is not installed."""
    require(PEER, "pip install 'trl==1.16.0' (for the comparison alone; lowpeak never imports it)")


def available_sides(quick: bool) -> tuple[str, ...]:
    """Return both sides; a quick run goes without TRL where it is not installed, any other exits."""
    if quick and importlib.util.find_spec(PEER) is None:
        print(f"{PEER} is not installed: {OURS} runs alone.", file=sys.stderr)
        return (OURS,)
    require_peer()
    return SIDES


def versions() -> dict[str, str | int | None]:
    """What was measured, and on what."""
    found: dict[str, str | int | None] = {name: _version(name) for name in _PACKAGES}
    return found | {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}


def print_result(result: Mapping[str, Any]) -> None:
    """The last line: one JSON object."""
    print(json.dumps(result), flush=True)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return statistics.fmean(values)


def deviation(values: Sequence[float]) -> float:
    """The unbiased standard deviation; 0 for a single value, which has none."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def ratio(ours: float, peer: float) -> float | None:
    """Ours over the peer's; None where the peer's is 0."""
    return round(ours / peer, 3) if peer else None


def _version(package: str) -> str | None:
    """The installed version; lowpeak's is that of the checkout, whose sources the sides run."""
    if package == OURS:
        return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return metadata.version(package) if importlib.util.find_spec(package) else None

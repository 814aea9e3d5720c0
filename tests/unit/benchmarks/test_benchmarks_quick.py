"""Each benchmark runs with `--quick`; where TRL is installed, beside it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from benchmarks.harness.process import ROOT

NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))


def refuse(figure: str) -> None:
    raise ValueError(f"{figure} is not finite")


@pytest.mark.release
@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_prints_one_json_object_last_with_finite_figures(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    *others, last = done.stdout.splitlines()
    assert not [line for line in others if line.startswith("{")]
    assert json.loads(last, parse_constant=refuse)["benchmark"] == name

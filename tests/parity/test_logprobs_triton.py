"""The Triton kernels without a GPU: their arithmetic in Triton's interpreter, and that GPUs' compilers take them.

Both run apart, because the interpreter must be chosen before Triton is imported. Triton is among the tests'
dependencies: where it is missing these fail.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HAS_WHEELS = sys.platform == "linux" and platform.machine() == "x86_64"
pytestmark = pytest.mark.skipif(not HAS_WHEELS, reason="Triton is published for Linux on x86-64 alone")


def run(script, cache, **environment):
    """What a script prints."""
    settings = {**os.environ, "TRITON_CACHE_DIR": str(cache), **environment}
    found = subprocess.run([sys.executable, HERE / script], env=settings, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_kernels_compute_what_the_torch_passes_and_the_definition_do(tmp_path):
    worst = re.search(r"worst (\S+)", run("interpreted_kernels.py", tmp_path, TRITON_INTERPRET="1"))
    assert worst is not None
    assert float(worst[1]) < 1e-5


def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    lines = run("compiled_kernels.py", tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines] == ["sm_80 plain", "sm_80 full", "sm_90 plain", "sm_90 full"]

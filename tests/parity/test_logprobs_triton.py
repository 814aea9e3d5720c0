"""The Triton kernels without a GPU: their arithmetic in Triton's interpreter, and what GPUs' assembler gives them.

Both run apart, because the interpreter must be chosen before Triton is imported. Triton is among the tests'
dependencies: where it is missing these fail.
"""

from __future__ import annotations

import json
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
    settings = {**os.environ, "PYTHONPATH": str(HERE.parent), "TRITON_CACHE_DIR": str(cache), **environment}
    found = subprocess.run([sys.executable, HERE / script], env=settings, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.extended
def test_the_kernels_compute_what_the_torch_passes_and_the_definition_do(tmp_path):
    found = run("interpreted_kernels.py", tmp_path, TRITON_INTERPRET="1")
    worst, of_optimizer = re.search(r"worst (\S+)", found), re.search(r"optimizer (\S+)", found)
    extremes = re.search(r"extremes (\S+) (\S+)", found)
    assert worst is not None
    assert of_optimizer is not None
    assert float(worst[1]) < 1e-5
    assert float(of_optimizer[1]) < 1e-3  # codes of 8 bits may differ by one
    assert extremes is not None
    assert float(extremes[1]) < 2**-15  # another neighbour of 24 bits
    assert float(extremes[2]) < 2 / 255  # another code


# Shared bytes that a block may have on GPUs of each compute capability (CUDA C++ Programming Guide, "Compute Capabilities").
SHARED = {"80": 163 << 10, "89": 99 << 10, "90": 227 << 10}
REGISTERS = 65_536  # of a block, on all of them


@pytest.mark.extended
def test_the_kernels_fit_gpus_that_are_not_here_without_spilling_a_register(tmp_path):
    lines = [json.loads(line) for line in run("compiled_kernels.py", tmp_path).splitlines()]
    too_few, variants = lines.pop(), lines
    for kernel in ("_chosen", "_statistics", "_gradient", "optimizer"):
        assert {each["capability"] for each in variants if each["kernel"] == kernel} == SHARED.keys()
    for each in variants:
        assert each["stack"] == each["local"] == 0, each
        assert each["shared"] <= SHARED[each["capability"]], each
        assert each["reg"] * each["threads"] <= REGISTERS, each
    assert too_few["too few"]["stack"] > 0  # so a spill would be seen

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
from itertools import product
from pathlib import Path

import pytest
from benchmarks.harness.process import ROOT

HERE = Path(__file__).parent
KERNELS = (
    "chosen logits",
    "softmax statistics",
    "gradient of logits",
    "divergences",
    "gradient of divergences",
    "optimizer step",
)
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
HAS_WHEELS = sys.platform == "linux" and platform.machine() == "x86_64"
pytestmark = pytest.mark.skipif(not HAS_WHEELS, reason="Triton is published for Linux on x86-64 alone")


def run(*arguments, cache, **environment):
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    settings = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache), **environment}
    command = [sys.executable, *arguments]
    found = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=400)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.extended
def test_the_kernels_compute_what_the_torch_passes_and_the_definition_do(tmp_path):
    found = run(str(HERE / "interpreted_kernels.py"), cache=tmp_path, TRITON_INTERPRET="1")
    worst, of_optimizer = re.search(r"worst (\S+)", found), re.search(r"optimizer (\S+)", found)
    extremes = re.search(r"extremes (\S+) (\S+)", found)
    of_pairs, near = re.search(r"pairs (\S+)", found), re.search(r"near (\S+)", found)
    assert worst is not None
    assert of_pairs is not None
    assert near is not None
    assert of_optimizer is not None
    assert float(worst[1]) < 1e-5
    assert float(of_pairs[1]) < 1e-4  # log p and log q are rounded at up to 30 nats
    assert float(near[1]) < 5e-3
    assert float(of_optimizer[1]) < 1e-3  # codes of 8 bits may differ by one
    assert extremes is not None
    assert float(extremes[1]) < 2**-15  # another neighbour of 24 bits
    assert float(extremes[2]) < 2 / 255  # another code


@pytest.mark.extended
def test_the_kernels_fit_gpus_that_are_not_here_without_spilling_a_register(tmp_path):
    found = json.loads(run("-m", "benchmarks.kernel_resources", "--quick", cache=tmp_path).splitlines()[-1])
    kernels = [each for each in found["kernels"] if not each["kernel"].startswith("FlexAttention")]
    assert {(each["kernel"], each["capability"]) for each in kernels} == set(product(KERNELS, CAPABILITIES))
    for each in kernels:
        assert each["fits"], each
        assert each["stack_bytes"] == 0, each


ONE_WARP = """
from benchmarks.harness.cubins import logprob_kernel
flags = dict.fromkeys(("WITH_BIAS", "WITH_CAP", "WITH_DOT"), True)
print(logprob_kernel("softmax statistics", flags, "8.0", aligned=True, num_warps=1).stack_bytes)
"""


@pytest.mark.extended
def test_registers_that_spill_are_seen(tmp_path):
    assert int(run("-c", ONE_WARP, cache=tmp_path)) > 0

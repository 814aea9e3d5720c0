"""`lowpeak env --selftest` with a real vLLM: every transport that a CPU has, in this process and to a server."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

WORKED = [
    r"\| vLLM colocated \| ok \| .+ verified: process .+ ms .+, tcp .+ ms .+; log-probs within .+ \(temperature 0.7, top_p 0.9\)",
    r"\| vLLM server \| ok \| pushed and verified: tcp .+ ms .+; log-probs within .+ \(temperature 0.7, top_p 0.9\)",
    r"\| vLLM server on another GPU \| not run \| needs 2 GPUs \|",
    r"2 ok, 0 failed, 1 not run, in .+ s",
]


@pytest.mark.release  # its two vLLMs take 80 s; tests/unit/selftest runs it with fakes
def test_the_self_test_of_a_machine_that_works_says_so() -> None:
    command = [sys.executable, "-m", "lowpeak", "env", "--selftest"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [text for text in WORKED if not re.search(text, ended.stdout)] == []

"""`lowpeak env --selftest` with a real vLLM: every transport that a CPU has, in this process and to a server."""

from __future__ import annotations

import subprocess
import sys

WORKED = [
    "colocated, process: pushed and proved",
    "colocated, shm: pushed and proved",
    "colocated, tcp: pushed and proved",
    "colocated: log-probs within",
    "server, shm: pushed and proved",
    "server, tcp: pushed and proved",
    "server: log-probs within",
]


def test_the_self_test_of_a_machine_that_works_says_so() -> None:
    command = [sys.executable, "-m", "lowpeak", "env", "--selftest"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [text for text in WORKED if text not in ended.stdout] == []
    assert "FAILED" not in ended.stdout

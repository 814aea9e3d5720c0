"""Two hosts on one machine: network namespaces that see each other through a virtual cable.

Where a machine does not allow namespaces, two loopback addresses stand for the hosts; they cannot lose their cable, so a host
goes away by having its processes killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spawn import PATH, TESTS

from child_processes import QUIET

SCRIPT = str(TESTS / "distributed" / "run_launched.py")


@dataclass(frozen=True)
class Host:
    """One host: its address, the interface that has it, the namespace it is (None: this machine's own)."""

    address: str
    interface: str
    namespace: str | None

    def start(self, words: Sequence[str], log: Path, **environ: str) -> subprocess.Popen[bytes]:
        """A process on this host, in a session of its own; what it writes goes to `log`."""
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        env = {**os.environ, **QUIET, "PYTHONPATH": PATH, "GLOO_SOCKET_IFNAME": self.interface, **environ}
        with log.open("wb") as file:
            return subprocess.Popen(
                [*inside, sys.executable, *words],
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def go_away(self, process: subprocess.Popen[bytes]) -> None:
        """Lose the cable without a word to the other host; or be killed, agent and ranks."""
        if self.namespace:
            _ip("-n", self.namespace, "link", "set", self.interface, "down")
        else:
            kill_all(process)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """The hosts, for a block."""
    names = [f"lp{os.getpid()}{letter}" for letter in "ab"]
    try:
        try:
            yield _namespaces(names)
        except _NotAllowedError:
            yield Host("127.0.0.2", "lo", None), Host("127.0.0.3", "lo", None)
    finally:
        for name in names:
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", name)


class _NotAllowedError(Exception):
    """This machine makes no namespaces for us."""


def _namespaces(names: Sequence[str]) -> tuple[Host, Host]:
    hosts = tuple(Host(f"10.77.0.{i + 1}", name, name) for i, name in enumerate(names))
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for host in hosts:
            _ip("-n", host.interface, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.interface, "link", "set", host.interface, "up")
            _ip("-n", host.interface, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        raise _NotAllowedError from error
    return hosts[0], hosts[1]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True, timeout=20)


def finish(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], seconds: float) -> list[tuple[int, str]]:
    """Exit status and output of each, once all have ended; AssertionError with what they wrote where one does not."""
    deadline = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        outputs = [log.read_text(errors="replace") for log in logs]
        late = [i for i, process in enumerate(processes) if process.poll() is None]
        assert not late, f"{late} did not end within {seconds} s:\n" + "\n".join(outputs)
        return [(int(p.returncode), text) for p, text in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            kill_all(process)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """End a launcher's processes: its ranks are in sessions of their own."""
    import psutil

    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            each.send_signal(signal.SIGKILL)
        process.wait(10)


def wait_for(text: str, log: Path, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Return once `text` stands in the log."""
    deadline = time.monotonic() + seconds
    while text not in (log.read_text(errors="replace") if log.exists() else ""):
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.1)

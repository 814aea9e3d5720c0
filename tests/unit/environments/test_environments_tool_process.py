"""Tools in processes of their own: results, errors, time limits, what they can see."""

from __future__ import annotations

import pytest

from lowpeak.arguments import ToolSettings
from lowpeak.environments.toolset import Toolset
from lowpeak.errors import ArgumentError
from lowpeak.rewards import BackgroundLoop, load_object
from process_ends import are_gone

pytestmark = pytest.mark.processes
TOOLS = '''
import os, subprocess, threading, time

def double(n: int) -> int:
    """Double.

    Args:
        n: A number.
    """
    print("a tool may print")
    return 2 * n

def hang(path: str) -> None:
    """Hang.

    Args:
        path: Where to write the process.
    """
    child = subprocess.Popen(["sleep", "60"])
    open(path, "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(60)

def secrets() -> str:
    """Look."""
    return ",".join(name for name in os.environ if "TOKEN" in name)

def die() -> None:
    """Die."""
    os._exit(3)

def flood() -> str:
    """Write a lot."""
    return "a" * (1 << 22)

def accents() -> str:
    """Write fewer bytes than their escapes in JSON have."""
    return "\u00e9" * 300_000

class Later:
    def __await__(self):
        yield from ()
        return "later"

def later() -> Later:
    """Return what is to be awaited."""
    return Later()

def leave() -> str:
    """Leave a thread behind."""
    threading.Thread(target=time.sleep, args=(60,)).start()
    return "left"

def interrupt() -> None:
    """Raise what is no Exception."""
    raise KeyboardInterrupt(77)
'''


@pytest.fixture
def run(tmp_path):
    (tmp_path / "own_tools.py").write_text(TOOLS)
    names = ("double", "hang", "secrets", "die", "flood", "accents", "later", "leave", "interrupt")
    tools = [load_object(f"{tmp_path}/own_tools.py:{name}", "Tool") for name in names]
    toolset, loop = Toolset(tools, None, ToolSettings(None, 2.0, "process")), BackgroundLoop()
    functions = {tool.__name__: tool for tool in toolset.tools}
    return lambda name, **arguments: loop.run(toolset.runner.run(functions[name], arguments))


def test_a_call_returns_its_result_and_errors_are_text(run):
    assert run("double", n=21) == "42"
    with pytest.raises(RuntimeError, match="'m'"):
        run("double", m=1)
    with pytest.raises(RuntimeError, match="3"):
        run("die")
    with pytest.raises(RuntimeError, match="1048576"):
        run("flood")
    with pytest.raises(RuntimeError, match="77"):
        run("interrupt")
    assert run("accents") == "\u00e9" * 300_000
    assert (run("later"), run("leave")) == ("later", "left")


def test_the_runs_tokens_are_not_in_a_tools_environment(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("secrets") == ""


def test_a_time_limit_ends_the_process_and_what_it_started(run, tmp_path):
    with pytest.raises(Exception, match="2"):
        run("hang", path=str(tmp_path / "pids"))
    assert are_gone([int(pid) for pid in (tmp_path / "pids").read_text().split()], 5)


def test_a_function_that_another_process_cannot_load_is_refused():
    def local() -> None:
        """Do nothing."""

    with pytest.raises(ArgumentError, match="'local'"):
        Toolset([local], None, ToolSettings(None, None, "process"))

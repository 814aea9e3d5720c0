from __future__ import annotations

import subprocess
import sys

import pytest

import lowpeak
from lowpeak.cli.commands import COMMANDS, main
from lowpeak.errors import ArgumentError


def test_without_arguments_the_commands_are_listed(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {command} " in shown for command in COMMANDS)


def test_an_error_of_the_user_s_is_one_line_and_status_2_or_a_traceback_on_request(capsys, monkeypatch):
    assert main(["grop"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lowpeak: error: ")
    assert "'grop'" in error
    assert error.count("\n") == 1
    monkeypatch.setenv("LOWPEAK_TRACEBACK", "1")
    with pytest.raises(ArgumentError, match="'grop'"):
        main(["grop"])


def test_the_module_runs_as_the_command_does():
    done = subprocess.run(
        [sys.executable, "-m", "lowpeak", "nothing"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "lowpeak: error" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_of_its_own_ends_without_a_search_for_cycles():
    last = "atexit.register(lambda: print('frozen:', gc.get_freeze_count() > 0))"
    command = "sys.argv = ['lowpeak', '--version']; sys.exit(main())"
    program = f"import atexit, gc, sys; from lowpeak.cli.commands import main; {last}; {command}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [lowpeak.__version__, "frozen: True"]


def test_a_command_does_not_warn_of_a_kernel_that_no_run_uses():
    pytest.importorskip("bitsandbytes")
    program = "from lowpeak.cli.commands import main; main(['--version']); import bitsandbytes"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "gemm_4bit" not in done.stderr

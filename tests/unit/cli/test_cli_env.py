from __future__ import annotations

from importlib.metadata import version as installed

import lowpeak
from lowpeak.cli.env import PACKAGES, report, version
from lowpeak.cli.main import main


def test_versions_and_hardware_are_one_line_each():
    facts = dict(line.split(": ", 1) for line in report().splitlines())
    assert facts["lowpeak"] == lowpeak.__version__
    assert facts["torch"] == installed("torch")
    assert {
        *PACKAGES,
        "python",
        "platform",
        "CUDA of torch",
        "ROCm of torch",
        "process groups",
        "cpu",
        "memory",
    } <= facts.keys()
    assert "cores" in facts["cpu"]
    assert facts["memory"].endswith(" GiB")


def test_a_package_that_is_missing_is_said_to_be():
    assert version("a-package-that-nobody-wrote") == "not installed"


def test_env_takes_no_arguments(capsys):
    assert main(["env", "--verbose"]) == 2
    assert "takes --selftest alone" in capsys.readouterr().err

from __future__ import annotations

import os
from importlib.metadata import version as installed

import pytest
import torch

import lowpeak
from lowpeak.cli import PACKAGES, environment_report, installed_version, main
from lowpeak.cpu_cores import allowed_cores


def test_versions_and_hardware_are_one_line_each():
    facts = dict(line.split(": ", 1) for line in environment_report().splitlines())
    assert facts["lowpeak"] == lowpeak.__version__
    assert facts["torch"] == installed("torch")
    hardware = {"python", "platform", "CUDA of torch", "ROCm of torch", "process groups", "cpu", "memory"}
    assert {*PACKAGES, *hardware} <= facts.keys()
    assert "cores" in facts["cpu"]
    assert facts["memory"].endswith(" GiB")
    assert facts["physical cores"].split()[0] == str(allowed_cores())
    assert facts["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "not set")


def test_a_package_that_is_missing_is_said_to_be():
    assert installed_version("a-package-that-nobody-wrote") == "not installed"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--verbose"], "verbose"),
        (["--gpu"], "--selftest"),
        (["--gpu", "h100", "run.yaml"], "needs --selftest"),
        pytest.param(
            ["--selftest", "--gpu"],
            "GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_a_self_test_that_cannot_run_is_one_line_and_nothing_else(words, told, capsys):
    assert main(["env", *words]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.err.count("\n") == 1
    assert not said.out

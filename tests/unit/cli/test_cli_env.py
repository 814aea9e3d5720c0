from __future__ import annotations

import json
import os
from importlib.metadata import version as installed

import pytest
import torch

import lowpeak
from lowpeak.cli.commands import main
from lowpeak.cli.env import PACKAGES, driver_facts, environment_report, installed_version
from lowpeak.cpu_cores import allowed_cores


def test_versions_and_hardware_are_one_line_each():
    facts = dict(line.split(": ", 1) for line in environment_report().splitlines())
    assert facts["lowpeak"] == lowpeak.__version__
    assert facts["torch"] == installed("torch")
    hardware = {"python", "platform", "CUDA of torch", "ROCm of torch", "process groups", "cpu", "memory", "gcc", "g++"}
    hardware |= {"cuDNN", "PYTORCH_ALLOC_CONF"}
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
        (["--quick"], "`lowpeak env --quick` needs --selftest"),
        (["run.yaml", "--rows=decode"], "`lowpeak env --rows` needs --selftest"),
        (["--format", "json"], "`lowpeak env --format` needs --selftest"),
        (["--selftest", "--rows", "decode,decoding"], "'decoding'"),
        (["--selftest", "--rows", "decode", "--quick"], "--quick"),
        (["--selftest", "--format", "xml"], "--format"),
        (["--selftest", "run.yaml"], "run.yaml"),
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


def test_the_result_for_an_issue_is_one_document_and_the_table_is_on_stderr(capsys):
    assert main(["env", "--selftest", "--rows", "ddp", "--format", "json"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["environment"]["lowpeak"] == lowpeak.__version__
    assert [(each["row"], each["result"]) for each in document["rows"]] == [("ddp", "not run")]
    assert "| ddp | not run | needs 2 GPUs |" in said.err


FAKE_SMI = """#!/bin/sh
echo "WARNING: infoROM is corrupted at gpu 0000:01:00.0"
echo "580.95.05, 80500, 81559"
echo "580.95.05, 17000, 81559"
"""


def test_the_driver_and_free_memory_are_those_that_nvidia_smi_prints_for_each_card(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(FAKE_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = driver_facts()
    assert facts == {
        "driver": "580.95.05",
        "free memory of card 0": "80500 of 81559 MiB",
        "free memory of card 1": "17000 of 81559 MiB",
    }
    program.unlink()
    assert "nvidia-smi" in driver_facts()["driver"]


def test_a_compiler_that_is_missing_is_named_with_what_needs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = dict(line.split(": ", 1) for line in environment_report().splitlines())
    assert "Triton" in facts["gcc"]
    assert "CPUAdam" in facts["g++"]

from __future__ import annotations

import json
import os
from importlib.metadata import version as installed

import pytest
import torch
from transformers import T5Config

import lowpeak
from lowpeak.cli.commands import main
from lowpeak.cli.env import PACKAGES, driver_facts, environment_report, installed_version
from lowpeak.cpu_cores import allowed_cores
from lowpeak.rollout.native.cache_bytes import measure_cache
from model_families import make_config, make_family


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


def test_the_same_facts_are_one_json_object(capsys):
    assert main(["env", "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["lowpeak"], facts["torch"]) == (lowpeak.__version__, installed("torch"))


def test_a_package_that_is_missing_is_said_to_be():
    assert installed_version("a-package-that-nobody-wrote") == "not installed"


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["--verbose"], "verbose"),
        (["--gpu"], "--selftest"),
        (["--gpu", "h100", "run.yaml"], "needs --selftest"),
        (["--quick"], "`lowpeak env --quick` needs --selftest"),
        (["run.yaml", "--rows=decode"], "`lowpeak env --rows` needs --selftest"),
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
def test_a_self_test_that_cannot_run_is_one_line_and_nothing_else(words, pattern, capsys):
    assert main(["env", *words]) == 2
    output = capsys.readouterr()
    assert pattern in output.err
    assert output.err.count("\n") == 1
    assert not output.out


def test_the_result_for_an_issue_is_one_document_and_the_table_is_on_stderr(capsys):
    assert main(["env", "--selftest", "--rows", "ddp", "--format", "json"]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["environment"]["lowpeak"] == lowpeak.__version__
    assert [(each["row"], each["result"]) for each in document["rows"]] == [("ddp", "not run")]
    assert "| ddp | not run | needs 2 GPUs |" in output.err


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


def test_a_models_config_says_how_it_generates_trains_and_what_it_caches(tmp_path, capsys):
    folder = str(tmp_path / "model")
    make_config("Nemotron-H").save_pretrained(folder)
    assert main(["env", folder, "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["model type"], facts["generation"], facts["layout"]) == (
        *("nemotron_h", "decode loop"),
        "packed without padding",
    )
    assert "transformers" in facts["recurrent kernels"]
    assert "experts.down_proj" in facts["LoRA on all-linear"]
    cache = measure_cache(make_family("Nemotron-H"), torch.bfloat16)
    found = (facts["cache bytes per token"], facts["state bytes per sequence"])
    assert found == (cache.by_window[None], cache.states) != (0, 0)


def test_a_window_has_a_line_and_a_generation_path_its_reason(tmp_path, capsys):
    for family in ("gpt-oss", "Bloom"):
        make_config(family).save_pretrained(tmp_path / family)
        assert main(["env", str(tmp_path / family)]) == 0
    output = capsys.readouterr().out
    assert "cache bytes per token of the last 5: 128\n" in output
    assert "generation: model.generate(), which is slower and takes more memory: its forward does not accept" in output
    assert "layout: padded: " in output


def test_a_name_without_a_model_is_one_sentence(tmp_path, capsys):
    T5Config().save_pretrained(tmp_path / "t5")
    for name, pattern in (("no/such/model", "no/such/model"), (str(tmp_path / "t5"), "no AutoModelForCausalLM for t5")):
        assert main(["env", name]) == 2
        output = capsys.readouterr()
        assert pattern in output.err
        assert output.err.count("\n") == 1

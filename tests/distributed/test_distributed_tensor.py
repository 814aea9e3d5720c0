"""Tensor parallelism, alone on two ranks and with FSDP2 on four, against one process; checkpoints go from each to each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from spawn import launch
from transformers import AutoModelForCausalLM

NAMES = ("grpo", "rloo", "frozen", "ppo", "online_dpo", "sft", "saved")
SIZES = ("2x1", "2x2")  # devices that tensors are cut over, and data ranks
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case in one process and under both sizes, each with a run that goes on; then each from the others' checkpoint."""
    out = str(tmp_path_factory.mktemp("tensor"))
    train("1x1", out, "cases")
    train("2x1", out, "cases")
    train("2x2", out, "cases", "2x1")
    train("2x1", out, "2x2")
    train("1x1", out, "2x1", "2x2")
    return Path(out)


def train(sizes: str, out: str, *sources: str) -> None:
    tensor, data = sizes.split("x")
    launch("run_tensor.py", [tensor, data, out, *sources], world_size=int(tensor) * int(data))


def read(runs: Path, sizes: str, name: str) -> dict[str, Any]:
    return torch.load(runs / f"{sizes}-{name}.pt")


def assert_near(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, values in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], values, atol=TOLERANCE, rtol=0)
    assert ours["steps"].keys() == theirs["steps"].keys()
    for step, numbers in theirs["steps"].items():
        torch.testing.assert_close(torch.tensor(ours["steps"][step]), torch.tensor(numbers), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_whose_tensors_are_cut_is_the_run_of_one_process(runs: Path, sizes: str, name: str) -> None:
    ours = read(runs, sizes, name)
    assert ours["strategy"] == "TensorParallel"
    assert_near(ours, read(runs, "1x1", name))


@pytest.mark.parametrize("sizes", SIZES)
def test_a_resumed_run_whose_tensors_are_cut_is_the_run_that_was_not_cut_off(runs: Path, sizes: str) -> None:
    again, whole = read(runs, sizes, f"from-{sizes}"), read(runs, sizes, "saved")
    assert [name for name, values in whole["weights"].items() if not torch.equal(again["weights"][name], values)] == []
    assert again["steps"] == whole["steps"]


@pytest.mark.parametrize(("source", "sizes"), [("2x1", "2x2"), ("2x2", "2x1"), ("2x1", "1x1"), ("2x2", "1x1")])
def test_a_run_whose_tensors_are_cut_goes_on_under_another_cut(runs: Path, source: str, sizes: str) -> None:
    assert_near(read(runs, sizes, f"from-{source}"), read(runs, source, "saved"))


@pytest.mark.parametrize("sizes", SIZES)
def test_a_checkpoint_of_cut_tensors_is_a_model(runs: Path, sizes: str) -> None:
    folder, trained = runs / sizes / "saved" / "checkpoint-6", read(runs, sizes, "saved")["weights"]
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert loaded.keys() == trained.keys()
    assert [name for name, values in trained.items() if not torch.equal(loaded[name].view(-1), values)] == []
    assert "tp_size" not in (folder / "config.json").read_text()

"""Checkpoints under DDP, FSDP2 and ZeRO: exact on as many ranks, right on others, whole or not there; exports that load."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from spawn import finish, launch, start
from transformers import AutoModelForCausalLM

from tiny import tiny_model

DAMAGED = ("fsdp2", "zero3")
SHARDED = ("fsdp2", "zero2", "zero3")
ALL = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every phase of the worker, each in one process group for all strategies."""
    out = tmp_path_factory.mktemp("checkpoints")
    launch("run_checkpoints.py", [str(out), "first", ",".join(ALL)])
    kill_in_the_middle(out)
    launch("run_checkpoints.py", [str(out), "one", ",".join(SHARDED)], world_size=1)
    launch("run_checkpoints.py", [str(out), "two", ",".join(SHARDED)])
    launch("run_checkpoints.py", [str(out), "four", ",".join(SHARDED)], world_size=4)
    return out


def kill_in_the_middle(out: Path) -> None:
    """Both ranks die by SIGKILL after step 5, with a checkpoint of step 3."""
    ranks = start("run_checkpoints.py", [str(out), "kill", "fsdp2"])
    deadline = time.monotonic() + 100
    while not all((out / "fsdp2" / f"waiting-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline, "the run did not come to its fifth step"
        assert all(process.poll() is None for process in ranks), finish(ranks, 5)
        time.sleep(0.1)
    for process in ranks:
        process.kill()
    assert [code for code, _ in finish(ranks, 20)] == [-9, -9]


@pytest.mark.parametrize("strategy", DAMAGED)
def test_no_damage_to_any_file_of_a_sharded_checkpoint_is_trained_on(runs: Path, strategy: str) -> None:
    first, second = read(runs, strategy, "damaged")
    assert len(first) > 40
    assert [case[:2] for case in first] == [case[:2] for case in second]
    for name, damage, told in (*first, *second):
        assert name in told or "holds no state of a lowpeak run" in told, (name, damage, told)
        assert "\n" not in told


def read(runs: Path, strategy: str, name: str) -> dict[str, Any]:
    return torch.load(runs / strategy / f"{name}.pt")


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("strategy", ALL)
def test_a_resumed_run_is_the_run_that_was_not_cut(runs: Path, strategy: str) -> None:
    whole, again = read(runs, strategy, "whole"), read(runs, strategy, "again")
    assert_same_bits(again["weights"], whole["weights"])
    assert [again["steps"][step] for step in (4, 5, 6)] == [whole["steps"][step] for step in (4, 5, 6)]


def test_a_run_whose_ranks_were_all_killed_goes_on_to_the_same_weights(runs: Path) -> None:
    assert_same_bits(read(runs, "fsdp2", "revived")["weights"], read(runs, "fsdp2", "whole")["weights"])


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("name", ["two-to-one", "one-to-two", "two-to-four"])
def test_a_run_goes_on_with_other_ranks(runs: Path, strategy: str, name: str) -> None:
    whole, other = read(runs, strategy, "whole"), read(runs, strategy, name)
    assert other["ranks"] == {"one": 1, "two": 2, "four": 4}[name.rpartition("-")[2]]
    assert_near(other["weights"], whole["weights"])
    for step in (4, 5, 6):
        torch.testing.assert_close(
            torch.tensor(other["steps"][step]), torch.tensor(whole["steps"][step]), atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("name", "strategy"), [("two-to-plain", "Replicated"), ("to-zero3", "Zero"), ("from-zero2", "Fsdp2")]
)
def test_a_sharded_run_goes_on_under_another_strategy(runs: Path, name: str, strategy: str) -> None:
    other = read(runs, "fsdp2", name)
    assert other["strategy"] == strategy
    assert_near(other["weights"], read(runs, "fsdp2", "whole")["weights"])


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("name", ["two-to-one", "one-to-two", "two-to-four"])
def test_an_average_is_read_by_other_ranks_to_the_bit(runs: Path, strategy: str, name: str) -> None:
    assert_same_bits(read(runs, strategy, name)["average"], read(runs, strategy, "whole")["weights"])


def test_a_checkpoint_that_ranks_cannot_share_out_is_refused(runs: Path) -> None:
    assert "holds no optimizer states that could be shared out among ranks" in torch.load(runs / "fsdp2" / "refused.pt")


@pytest.mark.parametrize("strategy", ALL)
def test_a_full_disk_on_one_rank_is_an_error_on_each_and_leaves_nothing(runs: Path, strategy: str) -> None:
    failed = read(runs, strategy, "failed")
    assert failed["left"] == [".lowpeak.lock", "checkpoint-3", "checkpoint-6", "journal"]
    for told in failed["told"]:
        assert len(told) == 2
        assert all("File too large" in sentence and "the last good checkpoint" in sentence for sentence in told)
    (_, second_at_first), (first_at_second, _) = failed["told"]
    assert "on rank 1" in second_at_first
    assert "on rank 0" in first_at_second


@pytest.mark.parametrize("strategy", ALL)
def test_what_is_exported_is_what_was_trained(runs: Path, strategy: str) -> None:
    for folder in (runs / strategy / "exported", runs / strategy / "run" / "checkpoint-6"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert_same_bits(dict(model.named_parameters()), read(runs, strategy, "whole")["weights"])
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118
            assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_adapter_is_saved_alone_and_resumed(runs: Path, strategy: str, dtype: torch.dtype) -> None:
    name = f"lora-{dtype}".replace("torch.", "")
    trained = read(runs, strategy, name)
    assert trained["dtypes"] == {torch.float32}
    assert_same_bits(read(runs, strategy, f"{name}-again")["weights"], trained["weights"])
    folder = runs / strategy / f"{name}-adapter"
    assert not (folder / "model.safetensors").exists()
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        saved = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert any(bool(values.any()) for key, values in saved.items() if "lora_B" in key)
    assert_same_bits(trained["adapter"], saved)


@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_a_merged_adapter_are_what_peft_merges(runs: Path, strategy: str, dtype: torch.dtype) -> None:
    name = f"lora-{dtype}".replace("torch.", "")
    whole = PeftModel.from_pretrained(tiny_model(dtype=dtype), runs / strategy / f"{name}-adapter").merge_and_unload()
    merged = read(runs, strategy, name)["weights"]
    assert merged.keys() == dict(whole.named_parameters()).keys()
    for key, values in whole.named_parameters():
        torch.testing.assert_close(merged[key], values.detach(), atol=1e-6, rtol=1e-2 if dtype.itemsize == 2 else 1e-6)
    loaded = AutoModelForCausalLM.from_pretrained(runs / strategy / f"{name}-merged", dtype="auto")
    assert loaded.dtype == dtype
    assert_same_bits(dict(loaded.named_parameters()), merged)


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_sharded_checkpoint_holds_each_weight_once_and_is_read_without_its_ranks(runs: Path, strategy: str) -> None:
    folder = runs / strategy / "run" / "checkpoint-6" / "shards"
    written = sum(path.stat().st_size for path in folder.iterdir())
    values = sum(p.numel() for p in tiny_model().parameters())
    assert 3 * 4 * values <= written <= 3 * 4 * values + 400_000

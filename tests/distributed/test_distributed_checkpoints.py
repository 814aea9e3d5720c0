"""Checkpoints under DDP, FSDP2 and ZeRO: exact on as many ranks, right on others, whole or not there; exports that load."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors import safe_open
from setups import (
    SAVED,
    assert_same_bits,
    assert_same_run,
    build,
    error_of,
    forget,
    keep,
    later_steps,
    prepare,
    result_of,
    weights_of,
)
from transformers import AutoModelForCausalLM, TrainerCallback

from case_selection import is_selected, mark_extended, selected_cases
from child_processes import KILLED, finish, start_ranks, succeed_on_ranks
from file_damage import DAMAGES, harm
from lowpeak.training.checkpoints import REFERENCE_FOLDER, load_extra_weights, save_checkpoint, save_extra_weights
from tiny_models import tiny_model

SHARDED = ("fsdp2", "zero2", "zero3")
ALL = ("ddp", "fsdp2", "zero2", "zero3")  # a checkpoint of ZeRO-1 is one of ZeRO-2
DAMAGED = ("fsdp2", "zero3")  # strategies whose checkpoints are damaged file by file
EACH = mark_extended(ALL, ("ddp", "fsdp2", "zero3"), "release")
EACH_ADAPTED = mark_extended(["ddp", "fsdp2", "zero3"], ["fsdp2"], "release")
# Runs that go on under a sharded strategy: from the checkpoint of so many ranks, on so many.
MOVES = [(strategy, name) for strategy in SHARDED for name in ("two-to-one", "one-to-two")]
MOVES += [("fsdp2", "two-to-four")]


def first(strategy: str, out: Path, is_damaged: bool) -> None:
    """A run, an export, disks that are full on one rank, a damaged checkpoint, and the same run resumed in its middle."""
    whole = build("GRPO", out / "run", {**prepare(strategy), **SAVED})
    whole.train()
    keep(whole, result_of(whole), out / "whole.pt")
    whole.save_model(str(out / "exported"))
    save_extra_weights(out / "average", REFERENCE_FOLDER, parameters_of(whole), whole.run.strategy.ranks)
    fail(whole, out)
    forget()
    again = build("GRPO", out / "again", {**prepare(strategy), **SAVED})
    if is_damaged and strategy in DAMAGED:
        damage_each_file(again, out / "run" / "checkpoint-3", out)
    again.train(resume_from_checkpoint=str(out / "run" / "checkpoint-3"))
    keep(again, result_of(again), out / "again.pt")
    forget()


def damage_each_file(trainer: Any, checkpoint: Path, out: Path) -> None:
    """Resume from a checkpoint with one damaged file, for each file in two ways; what each rank is told."""
    ranks, messages = trainer.run.strategy.ranks.processes, []
    files = ranks.call_on_first(lambda: sorted(path for path in checkpoint.rglob("*") if path.is_file()))
    for number, file in enumerate(files):
        whole = file.read_bytes()
        for damage in (DAMAGES[number % 5], DAMAGES[(number + 2) % 5]):
            ranks.gather(None)  # all ranks have read the file, and are done with the last damage
            if not ranks.call_on_first(lambda file=file, damage=damage: harm(file, damage)):
                continue
            error = error_of(lambda: trainer.train(resume_from_checkpoint=str(checkpoint)))
            messages.append((file.name, damage, error))
            ranks.call_on_first(lambda file=file, whole=whole: file.write_bytes(whole))
    keep(trainer, ranks.gather(messages), out / "damaged.pt")


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file of this process may grow beyond `limit` bytes: what a full disk looks like to who writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def fail(trainer: Any, out: Path) -> None:
    """Each rank's disk is full in turn."""
    ranks, messages = trainer.run.strategy.ranks, []
    trainer.state.global_step = 99
    for full in range(ranks.world_size):
        with small_files(2000) if ranks.rank == full else nullcontext():
            messages.append(error_of(lambda: save_checkpoint(trainer, None, trainer.run_state())))
    everybodys = ranks.gather(messages)
    keep(trainer, {"messages": everybodys, "left": sorted(p.name for p in (out / "run").iterdir())}, out / "failed.pt")


def adapters(strategy: str, out: Path) -> None:
    """LoRA on a bf16 base: trained, resumed, saved alone and merged."""
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj", "v_proj"], lora_dropout=0.0)
    arguments = {**prepare(strategy), "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    trainer = build("GRPO", out / "lora", arguments, model=tiny_model(dtype=torch.bfloat16), peft_config=config)
    trainer.train()
    trainer.save_model(str(out / "lora-adapter"))
    trainer.save_merged_model(str(out / "lora-merged"))
    result = {**result_of(trainer), "adapter": weights_of(trainer, weights="adapter")}
    result["dtypes"] = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    keep(trainer, result, out / "lora.pt")
    forget()
    arguments |= prepare(strategy)
    again = build("GRPO", out / "lora-again", arguments, model=tiny_model(dtype=torch.bfloat16), peft_config=config)
    again.train(resume_from_checkpoint=str(out / "lora" / "checkpoint-2"))
    keep(again, result_of(again), out / "lora-again.pt")
    forget()


def parameters_of(trainer):
    return dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())


def go_on(strategy: str, out: Path, checkpoint: Path, name: str) -> None:
    """Go on from a checkpoint of any number of ranks, and take up what stands for a reference's average."""
    trainer = build("GRPO", out / name, {**prepare(strategy), **SAVED})
    trainer.train(resume_from_checkpoint=str(checkpoint))
    result = result_of(trainer)
    if strategy not in ("single", "ddp"):  # any model that is sharded alike stands for a reference
        load_extra_weights(out / "average", REFERENCE_FOLDER, parameters_of(trainer), trainer.run.strategy.ranks)
        result["average"] = weights_of(trainer)
    keep(trainer, result, out / f"{name}.pt")
    forget()


def refuse(out: Path) -> None:
    """A checkpoint that ranks did not write together is not one that they could share out."""
    trainer, replicated = build("GRPO", out / "refused", {**prepare("fsdp2"), **SAVED}), out.parent / "ddp"
    messages = error_of(lambda: trainer.train(resume_from_checkpoint=str(replicated / "run/checkpoint-3")))
    keep(trainer, messages, out / "refused.pt")
    forget()


class StopForGood(TrainerCallback):
    """After step 4 says so, and waits to be killed."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            (self._out / f"waiting-{args.process_index}").touch()
            time.sleep(300)


def first_phase(adapted: list[str], is_damaged: bool, strategy: str, folder: Path) -> None:
    first(strategy, folder, is_damaged)
    if strategy in adapted:
        adapters(strategy, folder)
    if strategy == "fsdp2":
        refuse(folder)


def one_phase(strategy: str, folder: Path) -> None:
    trainer = build("GRPO", folder / "one", {**prepare(strategy), **SAVED})
    trainer.train()
    keep(trainer, result_of(trainer), folder / "one.pt")
    forget()
    go_on(strategy, folder, folder / "run" / "checkpoint-3", "two-to-one")
    if strategy == "fsdp2":
        go_on("single", folder, folder / "run" / "checkpoint-3", "two-to-plain")


def kill_phase(strategy: str, folder: Path) -> None:
    build("GRPO", folder / "killed", {**prepare(strategy), **SAVED}, callbacks=[StopForGood(folder)]).train()


def two_phase(across: bool, strategy: str, folder: Path) -> None:
    if (folder / "one").is_dir():
        go_on(strategy, folder, folder / "one" / "checkpoint-3", "one-to-two")
    if (folder / "killed").is_dir():
        go_on(strategy, folder, folder / "killed" / "checkpoint-3", "revived")
    if across and strategy == "fsdp2":
        go_on("zero3", folder, folder / "run" / "checkpoint-3", "to-zero3")
        go_on("fsdp2", folder, folder.parent / "zero2" / "run" / "checkpoint-3", "from-zero2")


def four_phase(strategy: str, folder: Path) -> None:
    go_on(strategy, folder, folder / "run" / "checkpoint-3", "two-to-four")


def in_turn(place: Path, out: Path, phase: Callable[[str, Path], None], strategies: Sequence[str]) -> None:
    """Run a phase under several strategies in one process group."""
    for strategy in strategies:
        (out / strategy).mkdir(exist_ok=True)
        phase(strategy, out / strategy)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """First on two ranks; a run of which all ranks are killed; then on one, two and four, from the others' checkpoints.

    Only what the selected tests read.
    """
    out, moves = tmp_path_factory.mktemp("checkpoints"), selected_cases(request, "strategy", "name")
    across = is_selected(request, "test_a_sharded_run_goes_on_under_another_strategy")
    is_damaged = is_selected(request, "test_no_damage_to_any_file_of_a_sharded_checkpoint_is_trained_on")
    adapted = selected_cases(request, "adapted")
    needed = {"ddp", "fsdp2", *adapted, *selected_cases(request, "strategy"), *(["zero2"] if across else [])}
    moved = [strategy for strategy in SHARDED if strategy in {*dict(moves), *(["fsdp2"] if across else [])}]
    start = partial(first_phase, adapted, is_damaged)
    succeed_on_ranks(in_turn, out / "first", out, start, [strategy for strategy in ALL if strategy in needed])
    kill_in_the_middle(out)
    succeed_on_ranks(in_turn, out / "one", out, one_phase, moved, world_size=1)
    succeed_on_ranks(in_turn, out / "two", out, partial(two_phase, across), sorted({"fsdp2", *moved}))
    if ("fsdp2", "two-to-four") in moves:
        succeed_on_ranks(in_turn, out / "four", out, four_phase, ["fsdp2"], world_size=4)
    return out


def kill_in_the_middle(out: Path) -> None:
    """Both ranks die by SIGKILL after step 4, with a checkpoint of step 3."""
    logs = [out / f"kill{rank}" for rank in range(2)]
    ranks = start_ranks(in_turn, (out, out, kill_phase, ("fsdp2",)), logs)
    deadline = time.monotonic() + 100
    while not all((out / "fsdp2" / f"waiting-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline, "the run did not come to its fourth step"
        assert all(process.is_alive() for process in ranks), finish(ranks, logs, 5)
        time.sleep(0.1)
    for process in ranks:
        process.kill()
    assert [ended.code for ended in finish(ranks, logs, 20)] == [KILLED, KILLED]


@pytest.mark.release
@pytest.mark.parametrize("strategy", DAMAGED)
def test_no_damage_to_any_file_of_a_sharded_checkpoint_is_trained_on(runs, strategy):
    first, second = read(runs, strategy, "damaged")
    assert len(first) > 16
    assert [case[:2] for case in first] == [case[:2] for case in second]
    for name, damage, messages in (*first, *second):
        assert messages.startswith("CheckpointError: "), (name, damage, messages)
        assert name in messages or "no state" in messages, (name, damage, messages)
        assert "\n" not in messages


def read(runs: Path, strategy: str, name: str) -> dict[str, Any]:
    return torch.load(runs / strategy / f"{name}.pt")


@pytest.mark.parametrize("strategy", EACH)
def test_a_resumed_run_is_the_run_that_was_not_cut(runs, strategy):
    whole, again = read(runs, strategy, "whole"), read(runs, strategy, "again")
    assert_same_bits(again["weights"], whole["weights"])
    assert later_steps(again) == later_steps(whole)


def test_a_run_whose_ranks_were_all_killed_goes_on_to_the_same_weights(runs):
    assert_same_bits(read(runs, "fsdp2", "revived")["weights"], read(runs, "fsdp2", "whole")["weights"])


@pytest.mark.parametrize(("strategy", "name"), mark_extended(MOVES, MOVES[:2], "release"))
def test_a_run_goes_on_with_other_ranks_and_an_average_is_read_to_the_bit(runs, strategy, name):
    whole, other = read(runs, strategy, "whole"), read(runs, strategy, name)
    assert other["ranks"] == {"one": 1, "two": 2, "four": 4}[name.rpartition("-")[2]]
    assert_same_run({**other, "steps": later_steps(other)}, {**whole, "steps": later_steps(whole)})
    assert_same_bits(other["average"], whole["weights"])


@pytest.mark.release
@pytest.mark.parametrize(
    ("name", "kind"), [("two-to-plain", "Replicated"), ("to-zero3", "Zero"), ("from-zero2", "Fsdp2")]
)
def test_a_sharded_run_goes_on_under_another_strategy(runs, name, kind):
    other = read(runs, "fsdp2", name)
    assert other["strategy"] == kind
    assert_same_run({**other, "steps": {}}, {**read(runs, "fsdp2", "whole"), "steps": {}})


def test_a_checkpoint_that_ranks_cannot_share_out_is_refused(runs):
    assert torch.load(runs / "fsdp2" / "refused.pt").startswith(f"CheckpointError: {runs / 'ddp/run/checkpoint-3'}")


@pytest.mark.parametrize("strategy", EACH)
def test_a_full_disk_on_one_rank_is_an_error_on_each_and_leaves_nothing(runs, strategy):
    failed = read(runs, strategy, "failed")
    assert failed["left"] == [".lowpeak.lock", "README.md", "checkpoint-3", "checkpoint-5", "journal"]
    for messages in failed["messages"]:
        assert len(messages) == 2
        assert all(text.startswith("CheckpointError: ") and "File too large" in text for text in messages)
    (_, second_at_first), (first_at_second, _) = failed["messages"]
    assert "on rank 1" in second_at_first
    assert "on rank 0" in first_at_second


@pytest.mark.parametrize("strategy", EACH)
def test_what_is_exported_is_what_was_trained(runs, strategy):
    for folder in (runs / strategy / "exported", runs / strategy / "run" / "checkpoint-5"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert_same_bits(dict(model.named_parameters()), read(runs, strategy, "whole")["weights"])
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118
            assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("adapted", EACH_ADAPTED)
def test_an_adapter_is_saved_alone_and_resumed(runs, adapted):
    trained = read(runs, adapted, "lora")
    assert trained["dtypes"] == {torch.float32}
    assert_same_bits(read(runs, adapted, "lora-again")["weights"], trained["weights"])
    folder = runs / adapted / "lora-adapter"
    assert not (folder / "model.safetensors").exists()
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        saved = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert any(bool(values.any()) for key, values in saved.items() if "lora_B" in key)
    assert_same_bits(trained["adapter"], saved)


@pytest.mark.parametrize("adapted", EACH_ADAPTED)
def test_slices_of_a_merged_adapter_are_what_peft_merges(runs, adapted):
    base = tiny_model(dtype=torch.bfloat16)
    whole = PeftModel.from_pretrained(base, runs / adapted / "lora-adapter").merge_and_unload()
    merged = read(runs, adapted, "lora")["weights"]
    assert merged.keys() == dict(whole.named_parameters()).keys()
    for key, values in whole.named_parameters():
        torch.testing.assert_close(merged[key], values.detach(), atol=1e-6, rtol=1e-2)
    loaded = AutoModelForCausalLM.from_pretrained(runs / adapted / "lora-merged", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert_same_bits(dict(loaded.named_parameters()), merged)


@pytest.mark.parametrize("strategy", mark_extended(SHARDED, ("fsdp2", "zero3"), "release"))
def test_a_sharded_checkpoint_holds_each_weight_once_and_is_read_without_its_ranks(runs, strategy):
    folder = runs / strategy / "run" / "checkpoint-5" / "shards"
    written = sum(path.stat().st_size for path in folder.iterdir())
    values = sum(p.numel() for p in tiny_model().parameters())
    assert 3 * 4 * values <= written <= 3 * 4 * values + 400_000

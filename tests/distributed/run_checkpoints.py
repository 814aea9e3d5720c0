"""Saves and resumes under several strategies in one process group: `run_checkpoints.py OUT PHASE STRATEGY,...`.

Phases: `first` trains, resumes, exports and meets full disks on two ranks; `one`, `four` and `two` go on from checkpoints of other
numbers of ranks; `kill` waits to be killed, for `two` to go on from.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from setups import build, forget, prepare
from transformers import TrainerCallback

from damage import DAMAGES, harm
from lowpeak.errors import CheckpointError
from lowpeak.training.checkpoints import REFERENCE_FOLDER, load_apart, save_apart, save_checkpoint

# A checkpoint after step 3 is in the middle of a rollout, which serves steps 3 and 4.
ARGUMENTS: dict[str, Any] = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 3,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
}


DAMAGED = ("fsdp2", "zero3")  # strategies whose checkpoints are damaged file by file


def weights_of(trainer: Any, max_bytes: int = 1 << 10, weights: str = "merged") -> dict[str, torch.Tensor]:
    """What the strategy's slices are, put together."""
    found: dict[str, list[torch.Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in trainer.run.strategy.slices(trainer.model_wrapped, max_bytes, None, weights):
        assert piece.values.numel() * piece.dtype.itemsize <= max_bytes
        assert piece.start == sum(part.numel() for part in found.get(piece.name, []))
        found.setdefault(piece.name, []).append(piece.values.clone())
        shapes[piece.name] = piece.shape
    return {name: torch.cat(parts).view(shapes[name]) for name, parts in found.items()}


def result_of(trainer: Any) -> dict[str, Any]:
    return {
        "weights": weights_of(trainer),
        "steps": {row["step"]: (row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row},
        "strategy": type(trainer.run.strategy).__name__,
        "ranks": trainer.args.world_size,
    }


def keep(trainer: Any, result: Any, path: Path) -> None:
    if trainer.is_world_process_zero():
        torch.save(result, path)


def first(strategy: str, out: Path) -> None:
    """A run, an export, disks that are full on one rank, a damaged checkpoint, and the same run resumed in its middle."""
    whole = build("GRPO", out / "run", {**prepare(strategy), **ARGUMENTS})
    whole.train()
    keep(whole, result_of(whole), out / "whole.pt")
    whole.save_model(str(out / "exported"))
    save_apart(out / "average", REFERENCE_FOLDER, parameters_of(whole), whole.run.strategy.ranks)
    fail(whole, out)
    forget()
    again = build("GRPO", out / "again", {**prepare(strategy), **ARGUMENTS})
    if strategy in DAMAGED:
        damage_each_file(again, out / "run" / "checkpoint-3", out)
    again.train(resume_from_checkpoint=str(out / "run" / "checkpoint-3"))
    keep(again, result_of(again), out / "again.pt")
    forget()


def damage_each_file(trainer: Any, checkpoint: Path, out: Path) -> None:
    """Resume from a checkpoint with one damaged file, for each file and damage; what each rank is told."""
    ranks, told = trainer.run.strategy.ranks.processes, []
    for file in ranks.first(lambda: sorted(path for path in checkpoint.rglob("*") if path.is_file())):
        whole = file.read_bytes()
        for damage in DAMAGES:
            ranks.gather(None)  # all ranks have read the file, and are done with the last damage
            if not ranks.first(lambda file=file, damage=damage: harm(file, damage)):
                continue
            try:
                trainer.train(resume_from_checkpoint=str(checkpoint))
                told.append((file.name, damage, "trained"))
            except CheckpointError as error:
                told.append((file.name, damage, str(error)))
            ranks.first(lambda file=file, whole=whole: file.write_bytes(whole))
    keep(trainer, ranks.gather(told), out / "damaged.pt")


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
    ranks, told = trainer.run.strategy.ranks, []
    trainer.state.global_step = 99
    for full in range(ranks.world_size):
        with small_files(2000) if ranks.rank == full else nullcontext():
            try:
                save_checkpoint(trainer, None, trainer.run_state())
                told.append("saved")
            except CheckpointError as error:
                told.append(str(error))
    everybodys = ranks.gather(told)
    keep(trainer, {"told": everybodys, "left": sorted(p.name for p in (out / "run").iterdir())}, out / "failed.pt")


def adapters(strategy: str, out: Path, dtype: torch.dtype) -> None:
    """LoRA on a base in `dtype`: trained, resumed, saved alone and merged."""
    from peft import LoraConfig

    from tiny import tiny_model

    name = f"lora-{dtype}".replace("torch.", "")
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj", "v_proj"], lora_dropout=0.0)
    arguments = {**prepare(strategy), "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = build("GRPO", out / name, arguments, model=tiny_model(dtype=dtype), peft_config=config)
    trainer.train()
    trainer.save_model(str(out / f"{name}-adapter"))
    trainer.save_merged_model(str(out / f"{name}-merged"))
    result = {**result_of(trainer), "adapter": weights_of(trainer, weights="adapter")}
    result["dtypes"] = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    keep(trainer, result, out / f"{name}.pt")
    forget()
    again = build(
        "GRPO",
        out / f"{name}-again",
        {**prepare(strategy), **arguments},
        model=tiny_model(dtype=dtype),
        peft_config=config,
    )
    again.train(resume_from_checkpoint=str(out / name / "checkpoint-2"))
    keep(again, result_of(again), out / f"{name}-again.pt")
    forget()


def parameters_of(trainer):
    return dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())


def go_on(strategy: str, out: Path, checkpoint: Path, name: str) -> None:
    """Go on from a checkpoint of any number of ranks, and take up what stands for a reference's average."""
    trainer = build("GRPO", out / name, {**prepare(strategy), **ARGUMENTS})
    trainer.train(resume_from_checkpoint=str(checkpoint))
    result = result_of(trainer)
    if strategy not in ("single", "ddp"):  # any model that is sharded alike stands for a reference
        load_apart(out / "average", REFERENCE_FOLDER, parameters_of(trainer), trainer.run.strategy.ranks)
        result["average"] = weights_of(trainer)
    keep(trainer, result, out / f"{name}.pt")
    forget()


def refuse(out: Path) -> None:
    """A checkpoint that ranks did not write together is not one that they could share out."""
    trainer = build("GRPO", out / "refused", {**prepare("fsdp2"), **ARGUMENTS})
    told = ""
    try:
        trainer.train(resume_from_checkpoint=str(out.parent / "ddp" / "run" / "checkpoint-3"))
    except CheckpointError as error:
        told = str(error)
    keep(trainer, told, out / "refused.pt")
    forget()


class StopForGood(TrainerCallback):
    """After step 5 says so, and waits to be killed."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            (self._out / f"waiting-{args.process_index}").touch()
            time.sleep(300)


def first_phase(strategy: str, folder: Path) -> None:
    first(strategy, folder)
    if strategy != "zero1":
        for dtype in (torch.float32, torch.bfloat16):
            adapters(strategy, folder, dtype)
    if strategy == "fsdp2":
        refuse(folder)


def one_phase(strategy: str, folder: Path) -> None:
    trainer = build("GRPO", folder / "one", {**prepare(strategy), **ARGUMENTS})
    trainer.train()
    keep(trainer, result_of(trainer), folder / "one.pt")
    forget()
    go_on(strategy, folder, folder / "run" / "checkpoint-3", "two-to-one")
    if strategy == "fsdp2":
        go_on("single", folder, folder / "run" / "checkpoint-3", "two-to-plain")


def kill_phase(strategy: str, folder: Path) -> None:
    build("GRPO", folder / "killed", {**prepare(strategy), **ARGUMENTS}, callbacks=[StopForGood(folder)]).train()


def two_phase(strategy: str, folder: Path) -> None:
    go_on(strategy, folder, folder / "one" / "checkpoint-3", "one-to-two")
    if (folder / "killed").is_dir():
        go_on(strategy, folder, folder / "killed" / "checkpoint-3", "revived")
        go_on("zero3", folder, folder / "run" / "checkpoint-3", "to-zero3")
        go_on("fsdp2", folder, folder.parent / "zero2" / "run" / "checkpoint-3", "from-zero2")


def four_phase(strategy: str, folder: Path) -> None:
    go_on(strategy, folder, folder / "run" / "checkpoint-3", "two-to-four")


PHASES = {"first": first_phase, "one": one_phase, "two": two_phase, "four": four_phase, "kill": kill_phase}


def main() -> None:
    out, phase, strategies = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
    for strategy in strategies:
        folder = out / strategy
        folder.mkdir(exist_ok=True)
        PHASES[phase](strategy, folder)


if __name__ == "__main__":
    main()

"""Checkpoints, journals and weights that a former version has written, which every later one resumes and arrives at.

`python tests/stored/store.py` resumes each stored run, trains it from its start too, and names those that differ from what is
stored in one bit; on another kind of processor than the store's last bits differ. `store.py write [KIND...]` writes the store anew.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SAVED_RUNS = HERE / "saved"
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "distributed"), str(HERE.parent / "faults")]

import setups  # noqa: E402
from fault_runs import steps  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import child_processes  # noqa: E402
from preference_data import tiny_classifier  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

CHECKPOINT = "checkpoint-3"
SAVED = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
REUSED = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}  # step 3 is in the middle of a rollout


@dataclass(frozen=True)
class Kind:
    """A kind of run; on ranks where it has a strategy."""

    algorithm: str
    args: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = ""
    lora: bool = False


KINDS = {
    "grpo": Kind("GRPO", REUSED | {"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 2}),
    "rloo": Kind("RLOO", REUSED),
    "ppo": Kind("PPO", {"critic": "model"}),
    "online-dpo": Kind("OnlineDPO"),
    "sft": Kind("SFT"),
    "reward": Kind("Reward"),
    "lora": Kind("GRPO", REUSED | {"beta": 0.04}, lora=True),
    "fsdp2": Kind("GRPO", REUSED | {"beta": 0.04}, strategy="fsdp2"),
    "zero3": Kind("GRPO", REUSED | {"beta": 0.04}, strategy="zero3"),
}


def run(place: Path, name: str, *, resume: bool) -> None:
    """Train in `place/run`, and write the weights and the journal's steps that it comes to beside it."""
    kind = KINDS[name]
    more: dict[str, Any] = {}
    if kind.lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    args = {**setups.prepare(kind.strategy), **SAVED, **kind.args}
    model = tiny_classifier(hidden_size=8, intermediate_size=16) if kind.algorithm == "Reward" else tiny_model(hidden=8)
    trainer = setups.build(kind.algorithm, place / "run", args, model=model, **more)
    trainer.train(resume_from_checkpoint=str(place / "run" / CHECKPOINT) if resume else None)
    weights = setups.result_of(trainer)["weights"]
    if trainer.is_world_process_zero():
        save_file({name: values.contiguous() for name, values in weights.items()}, place / "weights.safetensors")
        (place / "steps.json").write_text(json.dumps(steps(place / "run"), indent=1))


def start(name: str, place: Path) -> None:
    """Run a kind from its start in a process of its own, or on two ranks."""
    child_processes.succeed_on_ranks(from_start, place, name, world_size=2 if KINDS[name].strategy else 1)


def resume(name: str, place: Path) -> None:
    """Resume a kind's stored checkpoint in a copy of its folder."""
    shutil.copytree(SAVED_RUNS / name / "run", place / "run")
    child_processes.succeed_on_ranks(from_checkpoint, place, name, world_size=2 if KINDS[name].strategy else 1)


def from_start(place: Path, name: str) -> None:
    run(place, name, resume=False)


def from_checkpoint(place: Path, name: str) -> None:
    run(place, name, resume=True)


def found(place: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The weights and the steps that a run has come to."""
    return load_file(place / "weights.safetensors"), json.loads((place / "steps.json").read_text())


def write(name: str) -> None:
    """Run a kind and keep its checkpoint in the middle, its journal, and what it came to."""
    with tempfile.TemporaryDirectory() as folder:
        place, kept = Path(folder), SAVED_RUNS / name
        start(name, place)
        shutil.rmtree(kept, ignore_errors=True)
        for part in (CHECKPOINT, "journal"):
            shutil.copytree(place / "run" / part, kept / "run" / part)
        for file in ("weights.safetensors", "steps.json"):
            shutil.copy(place / file, kept)


def differs(name: str) -> list[str]:
    """Which ways of running a kind end in other bits than the stored ones."""
    weights, rows = found(SAVED_RUNS / name)
    ways = []
    for way in (start, resume):
        with tempfile.TemporaryDirectory() as folder:
            way(name, Path(folder))
            ours, our_rows = found(Path(folder))
        same = ours.keys() == weights.keys() and all(ours[key].equal(weights[key]) for key in weights)
        stored = [{key: row.get(key) for key in kept} for row, kept in zip(our_rows, rows, strict=True)]
        if not same or stored != rows:
            ways.append(way.__name__)
    return ways


def main(*words: str) -> None:
    """Write the named kinds (or all), or compare all."""
    if words[:1] == ("write",):
        for name in words[1:] or KINDS:
            write(name)
        return
    other = {name: ways for name in KINDS if (ways := differs(name))}
    print(f"{len(KINDS) - len(other)} of {len(KINDS)} to the last bit; others: {other or 'none'}")
    sys.exit(1 if other else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

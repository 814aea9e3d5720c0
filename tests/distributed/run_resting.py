"""Trains with and without what rests on the host meanwhile, under each strategy: `run_resting.py OUT STRATEGY ...`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from setups import build, forget, named_models, prepare, spread

from lowpeak.strategies.strategy import Frozen
from lowpeak.training.models import Reference
from lowpeak.training.resting import make_rest, resting
from movers import CopyingMover

SETTINGS = {"beta": 0.1, "max_steps": 3}


def let_rest(trainer: Any) -> None:
    """States, gradients, reference and reward model rest while completions are written, as on a GPU."""
    strategy, reference = trainer.run.strategy, trainer.maker.reference
    judge = trainer.maker.panel.rewards[1]
    for parameter in [*reference.model.parameters(), *judge.model.parameters()]:
        if not strategy.cuts_parameters:  # on a CPU a whole one is the checkpoint's file, whose pages nobody can free
            parameter.data = parameter.data.clone()
    rest = make_rest(trainer, trainer.parts.policy, strategy, CopyingMover(), least_bytes=64)
    trainer.maker.rest = rest
    ready = resting(rest, strategy, Frozen(reference.model, reference.use)).ready
    trainer.maker.reference = Reference(reference.model, ready)
    judge.use(resting(rest, strategy, Frozen(judge.model, judge._ready)), judge.ranks)


def watch(trainer: Any, seen: list[int]) -> None:
    """Note, each time the engine generates, how many bytes are on the device of what could rest."""
    generate = trainer.maker.engine.generate

    def noting(prompts: Any, sampling: Any) -> Any:
        strategy = trainer.run.strategy
        frozen = [*strategy.shards(trainer.maker.reference.model).values()]
        tensors = [t for t in [*strategy.idle(trainer.model, trainer.optimizer), *frozen] if t.numel() > 16]
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in map(_local, tensors)}
        seen.append(sum(storage.nbytes() for storage in storages.values()))
        return generate(prompts, sampling)

    trainer.maker.engine.generate = noting


def _local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def main() -> None:
    """Every strategy in one process group."""
    out, strategies = Path(sys.argv[1]), sys.argv[2:]
    policy, judge = named_models(out / "named")
    for strategy in strategies:
        found: dict[str, Any] = {}
        for rests in (False, True):
            arguments = {**prepare(strategy), **SETTINGS}
            trainer = build("GRPO", out / f"{strategy}-{rests}", arguments, model=policy, rewards=[spread, judge])
            seen: list[int] = []
            if rests:
                let_rest(trainer)
            watch(trainer, seen)
            trainer.train()
            weights = {name: shard.clone() for name, shard in trainer.run.strategy.shards(trainer.model).items()}
            found[f"{rests}"] = (weights, seen, [row.get("offload/bytes") for row in trainer.state.log_history])
            rank = trainer.args.process_index
            forget()
        torch.save(found, out / f"{strategy}-{rank}.pt")


main()

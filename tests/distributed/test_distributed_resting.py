"""What rests on the host while completions are written leaves every strategy's shards as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from setups import assert_same_bits, build, forget, named_models, prepare, rank, spread

from case_selection import mark_extended, selected_cases
from child_processes import succeed_on_ranks
from cpu_as_device import CopyingMover
from lowpeak.models.lora import Reference
from lowpeak.parallel.strategy import FrozenModel
from lowpeak.setup.build_run import add_to_offloader, make_rollout_offloader

STRATEGIES = mark_extended(["fsdp2", "zero2", "zero3"], ["fsdp2"])

SETTINGS = {"beta": 0.1, "max_steps": 3}


def let_rest(trainer: Any) -> None:
    """States, gradients, reference and reward model rest while completions are written, as on a GPU."""
    strategy, reference = trainer.run.strategy, trainer.run.reference
    judge = trainer.collector.panel.rewards[1]
    for parameter in [*reference.model.parameters(), *judge.model.parameters()]:
        if not strategy.shards_parameters:  # on a CPU a whole one is the checkpoint's file, whose pages nobody can free
            parameter.data = parameter.data.clone()
    rest = make_rollout_offloader(trainer, trainer.parts.policy, strategy, CopyingMover(), least_bytes=64)
    trainer.collector.offloader = rest
    ready = add_to_offloader(rest, strategy, FrozenModel(reference.model, reference.ready)).ready
    trainer.run = replace(trainer.run, reference=Reference(reference.model, ready))
    judge.replace_model(add_to_offloader(rest, strategy, FrozenModel(judge.model, judge._ready)), judge.ranks)


def watch(trainer: Any, seen: list[int]) -> None:
    """Note, each time the engine generates, how many bytes are on the device of what could rest."""
    generate = trainer.collector.engine.generate

    def noting(prompts: Any, sampling: Any) -> Any:
        strategy = trainer.run.strategy
        frozen = [*strategy.shards(trainer.run.reference.model).values()]
        tensors = [
            t for t in [*strategy.offloadable_tensors(trainer.model, trainer.optimizer), *frozen] if t.numel() > 16
        ]
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in map(_local, tensors)}
        seen.append(sum(storage.nbytes() for storage in storages.values()))
        return generate(prompts, sampling)

    trainer.collector.engine.generate = noting


def _local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def train_all(place: Path, out: Path, strategies: list[str]) -> None:
    policy, judge = named_models(out / "named")
    for strategy in strategies:
        found: dict[bool, Any] = {}
        for rests in (False, True):
            arguments = {**prepare(strategy), **SETTINGS}
            trainer = build("GRPO", place / f"{strategy}-{rests}", arguments, model=policy, rewards=[spread, judge])
            seen: list[int] = []
            if rests:
                let_rest(trainer)
            watch(trainer, seen)
            trainer.train()
            weights = {name: shard.clone() for name, shard in trainer.run.strategy.shards(trainer.model).items()}
            found[rests] = (weights, seen, [row.get("offload/bytes") for row in trainer.state.log_history])
            forget()
        torch.save(found, out / f"{strategy}-{rank()}.pt")


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("resting")
    named_models(out / "named")
    succeed_on_ranks(train_all, out / "runs", out, selected_cases(request, "strategy"))
    return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shards_and_states_leave_while_the_engine_writes_and_the_run_is_the_same_bits(runs, strategy):
    for number in (0, 1):
        found = torch.load(runs / f"{strategy}-{number}.pt")
        (plain, there, _), (rested, away, reported) = found[False], found[True]
        assert all(num_bytes > 0 for num_bytes in there)
        assert away == [0] * len(there)
        assert max(number for number in reported if number is not None) >= max(there)
        assert_same_bits(rested, plain)

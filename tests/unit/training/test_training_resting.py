"""A run whose states and frozen models rest in host memory while completions are written trains the same weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from cpu_as_device import CopyingMover
from lowpeak.models.lora import Reference
from lowpeak.parallel.detect import states_on_host
from lowpeak.parallel.strategy import FrozenModel
from lowpeak.setup.build_run import add_to_offloader, make_rollout_offloader
from small_runs import column, make, same, spread, steps, weights


def watched(trainer, seen):
    """The engine, noting at each call how many bytes of states and of the reference are on the device."""
    generate = trainer.collector.engine.generate

    def noting(prompts, sampling):
        states = [v for state in trainer.optimizer.state.values() for v in state.values() if v.numel() > 1]
        reference = trainer.run.reference.model.parameters()
        seen.append(tuple(sum(t.untyped_storage().nbytes() for t in tensors) for tensors in (states, reference)))
        return generate(prompts, sampling)

    trainer.collector.engine.generate = noting


def trained(folder, rests):
    settings = {"max_completion_length": 6, "max_steps": 3, "beta": 0.1}
    trainer = make("GRPO", folder, reward_funcs=spread, **settings)
    seen: list[tuple[int, int]] = []
    if rests:
        strategy, reference = trainer.run.strategy, trainer.run.reference
        rest = make_rollout_offloader(trainer, trainer.parts.policy, strategy, CopyingMover(), least_bytes=64)
        ready = add_to_offloader(rest, strategy, FrozenModel(reference.model, reference.ready)).ready
        trainer.collector.offloader = rest
        trainer.run = replace(trainer.run, reference=Reference(reference.model, ready))
    watched(trainer, seen)
    trainer.train()
    return trainer, seen


def test_states_and_the_reference_are_away_while_completions_are_written_and_nothing_else_changes(tmp_path):
    plain, there = trained(tmp_path / "plain", rests=False)
    rested, away = trained(tmp_path / "rested", rests=True)
    assert [states > 0 for states, _ in there] == [False, True, True]  # the first step makes them
    assert all(reference > 0 for _, reference in there)
    assert away == [(0, 0)] * 3
    assert same(weights(plain), weights(rested))
    reference = there[0][1]
    assert column(rested, "offload/bytes") == [reference, *(reference + there[1][0],) * 2]
    assert all(row["time/offload"] > 0 for row in steps(rested))
    assert "offload/bytes" not in plain.state.log_history[0]


def accelerator(device="cuda", offload="none", **plugins):
    zero = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": offload}}}
    plugins = plugins or {"deepspeed_plugin": SimpleNamespace(deepspeed_config=zero)}
    return SimpleNamespace(device=torch.device(device), state=SimpleNamespace(**plugins))


@pytest.mark.parametrize(
    "where",
    [
        accelerator(offload="cpu"),
        accelerator(offload="nvme"),
        accelerator(fsdp_plugin=SimpleNamespace(cpu_offload=CPUOffloadPolicy())),
    ],
)
def test_states_that_are_on_the_host_already_are_known(where):
    assert states_on_host(where.state)
    for here in (
        accelerator(),
        accelerator(fsdp_plugin=SimpleNamespace(cpu_offload=OffloadPolicy())),
        accelerator(nothing=None),
    ):
        assert not states_on_host(here.state)

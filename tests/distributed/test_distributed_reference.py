"""A bf16 reference's moving average on ranks: noise is derived from names and positions, so replicas and strategies agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from setups import assert_same_bits, build, forget, keep, prepare, tensor_parallel, weights_of

from child_processes import succeed_on_ranks
from lowpeak.optim.formats import rounding_noise, split_weights
from tiny_models import char_tokenizer, tiny_model

STRATEGIES = ("ddp", "fsdp2", "zero3", "tensor")
SHARE, KEY = 0.01, "0/reference/9"
SYNC = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": SHARE, "max_steps": 2}


def train(place: Path, out: Path) -> None:
    """Train with an average after each step; then average once more, by a key that the test knows."""
    for strategy in STRATEGIES:
        is_tensor = strategy == "tensor"
        placed = {**tensor_parallel(2, 1), "per_device_train_batch_size": 8} if is_tensor else prepare(strategy)
        storage = {} if strategy == "zero3" else {"weight_bits": 32}
        half = tiny_model(len(char_tokenizer()), hidden=64, dtype=torch.bfloat16)
        model: Any = str(out / "model") if is_tensor else half
        trainer = build("GRPO", out / strategy, {**placed, **storage, **SYNC}, model=model)
        trainer.train()
        reference, ranks = trainer.run.reference.model, trainer.run.strategy.ranks.processes
        before, policy = weights_of(trainer, model=reference), weights_of(trainer)
        trainer.run.strategy.average(reference, trainer.model, SHARE, KEY)
        local = {name: values.cpu() for name, values in trainer.run.strategy.shards(reference).items()}
        found = {"before": before, "policy": policy, "after": weights_of(trainer, model=reference)}
        keep(trainer, {**found, "local": ranks.gather(local)}, out / f"{strategy}.pt")
        forget()


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    out = tmp_path_factory.mktemp("reference")
    tiny_model(16, hidden=64, dtype=torch.bfloat16).save_pretrained(out / "model")
    char_tokenizer("0123456789=+-*").save_pretrained(out / "model")
    succeed_on_ranks(train, out / "two", out)
    return lambda strategy: torch.load(out / f"{strategy}.pt")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_reference_stays_bf16_and_a_small_share_moves_some_weights(averaged, strategy):
    found = averaged(strategy)
    assert {values.dtype for values in found["after"].values()} == {torch.bfloat16}
    assert any(not torch.equal(values, found["before"][name]) for name, values in found["after"].items())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_the_average_is_rounded_with_the_noise_of_the_unsharded_parameter(averaged, strategy):
    found = averaged(strategy)
    for name, before in found["before"].items():
        mixed = before.float().lerp(found["policy"][name].float(), SHARE).flatten()
        noise = rounding_noise(f"{KEY}/{name}", 0, mixed.numel(), 16, mixed.device)
        assert torch.equal(found["after"][name].flatten(), split_weights(mixed, 16, noise)[0]), name


def test_replicas_have_the_same_bits(averaged):
    first, second = averaged("ddp")["local"]
    assert_same_bits(first, second)
    one, other = averaged("tensor")["local"]
    replicated = {name for name in one if "norm" in name}
    assert replicated
    assert_same_bits({name: one[name] for name in replicated}, {name: other[name] for name in replicated})

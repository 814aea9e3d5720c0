"""A training state that is written is the one that is read, and what cannot be cut anew says so."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from lowpeak.errors import CheckpointError
from lowpeak.ranks import Ranks
from lowpeak.strategies.shards import load_torch_state, save_shards
from lowpeak.strategies.states import torch_state, trained


class BlockScaled(torch.optim.SGD):
    """Keeps a scale per block of weights, as 8-bit optimizers do, beside one value per weight and a step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["moment"] = state.get("moment", torch.zeros_like(parameter, dtype=torch.uint8)) + 1
                state["scales"] = state.get("scales", torch.zeros(3)) + parameter.grad.sum()
                state["step"] = state.get("step", 0) + 1
        return super().step(closure)


class TwoRanks(Ranks):
    """What a rank of two sees where nothing is sent."""

    def __init__(self):
        super().__init__()
        self.world_size = 2


def model(width=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, width), nn.Linear(width, 3, bias=False))


def steps(net, optimizer, count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        net(torch.randn(4, 7, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def of_kind(name, net):
    kinds = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
        "blocks": lambda p: BlockScaled(p, lr=0.1),
    }
    return kinds[name](net.parameters())


def saved(tmp_path, name="adamw"):
    net = model()
    optimizer = of_kind(name, net)
    steps(net, optimizer, 3, 0)
    save_shards(tmp_path, torch_state(trained(net), optimizer), Ranks())
    return net, optimizer


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "blocks"])
def test_a_run_goes_on_from_its_state_to_the_same_bits(tmp_path, name):
    net, optimizer = saved(tmp_path, name)
    other = model()
    nn.init.zeros_(other[0].weight)
    new = of_kind(name, other)
    load_torch_state(tmp_path, other, new, Ranks())
    for one, another in ((net, optimizer), (other, new)):
        steps(one, another, 3, 1)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_weights_come_back_without_an_optimizer(tmp_path):
    net, _ = saved(tmp_path)
    other = model()
    load_torch_state(tmp_path, other, None, Ranks())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_states_of_blocks_are_not_shared_out_among_other_ranks(tmp_path):
    saved(tmp_path, "blocks")
    other = model()
    with pytest.raises(CheckpointError, match=r"written on 1 ranks with an optimizer whose states cannot be cut for 2"):
        load_torch_state(tmp_path, other, of_kind("blocks", other), TwoRanks())


def test_weights_of_another_shape_are_named(tmp_path):
    saved(tmp_path)
    other = model(width=6)
    with pytest.raises(CheckpointError, match=r"of weight of 0.weight it holds 35 values, and 42 are needed"):
        load_torch_state(tmp_path, other, of_kind("adamw", other), Ranks())


def test_another_optimizer_is_told(tmp_path):
    saved(tmp_path)
    other = model()
    with pytest.raises(CheckpointError, match="optimizer is another one"):
        load_torch_state(tmp_path, other, of_kind("sgd", other), Ranks())


def test_another_number_of_groups_is_told(tmp_path):
    saved(tmp_path)
    other = model()
    optimizer = torch.optim.AdamW([{"params": [p], "weight_decay": i} for i, p in enumerate(other.parameters())])
    with pytest.raises(CheckpointError, match="has 1 groups of parameters and this run's 3"):
        load_torch_state(tmp_path, other, optimizer, Ranks())


def test_groups_that_are_alike_may_be_divided_otherwise(tmp_path):
    net, optimizer = saved(tmp_path)
    other = model()
    divided = torch.optim.AdamW([{"params": [p]} for p in other.parameters()], lr=3.0)
    load_torch_state(tmp_path, other, divided, Ranks())
    assert [group["lr"] for group in divided.param_groups] == [optimizer.param_groups[0]["lr"]] * 3
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


class Runs:
    """What a pickle can do when it is read."""

    def __init__(self, call, *arguments):
        self.made = (call, arguments)

    def __reduce__(self):
        return self.made


@pytest.mark.parametrize(
    "call", [os.mkdir, torch.serialization.os.mkdir, torch.hub.os.makedirs, torch.load, Path.mkdir]
)
def test_reading_a_checkpoint_runs_no_code_from_it(tmp_path, call):
    saved(tmp_path)
    made = tmp_path / "made"
    (tmp_path / "shards/.metadata").write_bytes(pickle.dumps(Runs(call, made)))
    other = model()
    with pytest.raises(CheckpointError, match=r"\.metadata names .*, which no checkpoint does"):
        load_torch_state(tmp_path, other, None, Ranks())
    assert not made.exists()

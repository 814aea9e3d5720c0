"""Training states are read as they were written, and states that cannot be resharded raise an error."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import nn

from lowpeak.errors import CheckpointError
from lowpeak.optim.compact_adamw import CompactAdamW
from lowpeak.parallel.checkpoint_shards import load_torch_state, save_shards
from lowpeak.parallel.checkpoint_state import torch_training_state, trained_parameters
from lowpeak.ranks import Ranks


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
    """Rank 0 of two, without communication."""

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


KINDS = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "blocks": BlockScaled,
}


def make_optimizer(name, net):
    return KINDS[name](net.parameters(), lr=0.1)


def different_groups(net):
    return [{"params": [p], "weight_decay": i} for i, p in enumerate(net.parameters())]


def saved(tmp_path, name="adamw"):
    net = model()
    optimizer = make_optimizer(name, net)
    steps(net, optimizer, 3, 0)
    save_shards(tmp_path, torch_training_state(trained_parameters(net), optimizer), Ranks())
    return net, optimizer


@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_optimizer_continues_with_the_same_bits(tmp_path, name):
    net, optimizer = saved(tmp_path, name)
    other = model()
    nn.init.zeros_(other[0].weight)
    new = make_optimizer(name, other)
    load_torch_state(tmp_path, other, new, Ranks())
    for one, another in ((net, optimizer), (other, new)):
        steps(one, another, 3, 1)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "width", "make", "ranks", "message"),
    [
        ("blocks", 5, lambda net: make_optimizer("blocks", net), TwoRanks, " 1 ranks .* 2 "),
        ("adamw", 6, lambda net: make_optimizer("adamw", net), Ranks, r" 0\.weight .* 35 .* 42 "),
        ("adamw", 5, lambda net: make_optimizer("sgd", net), Ranks, "momentum"),
        ("adamw", 5, lambda net: torch.optim.AdamW(different_groups(net)), Ranks, " 1 .* 3:"),
    ],
    ids=["block scales on other ranks", "other shapes", "another optimizer", "other groups"],
)
def test_a_state_that_does_not_fit_raises_an_error_that_names_it(tmp_path, name, width, make, ranks, message):
    saved(tmp_path, name)
    other = model(width)
    with pytest.raises(CheckpointError, match=message):
        load_torch_state(tmp_path, other, make(other), ranks())


def test_weights_are_loaded_without_an_optimizer_and_with_one_whose_equal_groups_are_split(tmp_path):
    net, optimizer = saved(tmp_path)
    alone, other = model(), model()
    divided = torch.optim.AdamW([{"params": [p]} for p in other.parameters()], lr=3.0)
    load_torch_state(tmp_path, alone, None, Ranks())
    load_torch_state(tmp_path, other, divided, Ranks())
    assert [group["lr"] for group in divided.param_groups] == [optimizer.param_groups[0]["lr"]] * 3
    for each in (alone, other):
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), each.parameters(), strict=True))


def allocator_peak(call):
    """The most bytes that torch's allocator has given out during a call, by its events."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda change: change.start_ns())
    return max(accumulate((change.nbytes() for change in changes), initial=0))


def test_a_checkpoint_of_few_bytes_a_parameter_is_written_with_one_decoded_piece_in_memory(tmp_path):
    net = nn.Sequential(*(nn.Linear(256, 512, bias=False) for _ in range(8))).to(torch.bfloat16)
    optimizer, named = CompactAdamW(net.parameters(), weight_bits=16, state_bits=8), trained_parameters(net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    decoded = 3 * 8 * 256 * 512 * 4  # the weights and both moments in fp32
    assert allocator_peak(lambda: save_shards(tmp_path, torch_training_state(named, optimizer), Ranks())) < decoded / 8
    before = {name: optimizer.read(parameter, "exp_avg", 0, 9) for name, parameter in named.items()}
    load_torch_state(tmp_path, net, optimizer, Ranks())
    for name, parameter in named.items():
        assert optimizer.read(parameter, "exp_avg", 0, 9).equal(before[name])

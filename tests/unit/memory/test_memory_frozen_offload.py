"""Frozen models in host memory compute the resident model's values, with two units on the device at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from cpu_as_device import streaming_mover
from lowpeak.heads import install_head
from lowpeak.heads.lm_head import HeadRequest
from lowpeak.memory.frozen_offload import most_streamed_bytes, offload_frozen
from lowpeak.parallel.base import Replicated
from lowpeak.parallel.partial_gather import decoder_layers
from preference_data import tiny_classifier
from tiny_models import tiny_experts, tiny_model

LEAST = 1024  # bytes: norms are smaller, embeddings larger
IDS = torch.arange(2, 12).reshape(2, 5)


class Shared(nn.Module):
    """One layer that runs three times, a table that is tied to a head, a weight of its own, and a buffer of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(13, 32), nn.Linear(32, 13, bias=False)
        self.head.weight = self.table.weight
        self.layer, self.gain = nn.Linear(32, 32), nn.Parameter(torch.rand(16, 32))
        self.layer.register_buffer("scale", torch.full((), 0.5))
        self.register_buffer("scale", self.layer.scale)

    def forward(self, input_ids):
        hidden = self.table(input_ids)
        for _ in range(3):
            hidden = self.layer(hidden) * self.scale + self.gain[0]
        return self.head(hidden)


class Plain(nn.Sequential):
    """No layers: a weight of one module is used by another's forward."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(13, 32), nn.Linear(32, 32, dtype=torch.float64))

    def forward(self, input_ids):
        return nn.functional.linear(self[0](input_ids).double(), self[1].weight, self[1].bias)


MODELS = {
    "tied": tiny_model,
    "bf16": lambda: tiny_model(tied=False, layers=4, dtype=torch.bfloat16),
    "experts": tiny_experts,
    "classifier": tiny_classifier,
    "shared": Shared,
    "without layers": Plain,
}


def layers_of(model):
    return [model.layer] if isinstance(model, Shared) else [] if isinstance(model, Plain) else decoder_layers(model)


def offloaded(monkeypatch, model):
    mover, events = streaming_mover(monkeypatch)
    model = copy.deepcopy(model)
    offload_frozen(model, layers_of(model), mover, LEAST)
    return model, mover, events


@torch.no_grad()
def logits_of(model):
    made = model(input_ids=IDS)
    return made if isinstance(made, torch.Tensor) else made.logits


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_the_resident_model_and_bytes_those_of_the_plan(monkeypatch, name):
    model = MODELS[name]()
    expected = logits_of(model)
    streamed, mover, _ = offloaded(monkeypatch, model)
    for _ in range(3):  # the first forward learns the order of units
        assert logits_of(streamed).equal(expected)
        assert mover.live_bytes == 0
    assert mover.most_bytes == most_streamed_bytes(model, layers_of(model), LEAST) > 0
    stored = dict(model.named_parameters())
    assert {name: p.shape for name, p in streamed.named_parameters()} == {name: p.shape for name, p in stored.items()}
    assert all(torch.equal(p, stored[name]) for name, p in streamed.named_parameters())


def log_runs(model, events):
    """Write down when each unit computes."""
    units = {"embeddings": model.model.embed_tokens, "head": model.lm_head}
    units |= {f"layer {index}": layer.mlp for index, layer in enumerate(model.model.layers)}
    for name, module in units.items():
        module.register_forward_pre_hook(lambda *_, name=name: events.append(f"{name} computes"))


def test_the_next_unit_is_copied_while_one_computes_and_each_is_waited_for(monkeypatch):
    model, _, events = offloaded(monkeypatch, tiny_model(tied=False))
    log_runs(model, events)
    logits_of(model)
    begun = events.count("copy waits for compute")
    events.clear()
    logits_of(model)
    copies = [f"copy {begun + number}" for number in range(1, 5)]
    # A copy begins after the computation of the unit before the running one: its memory is that unit's.
    begin = [["copy waits for compute", f"{name} begins"] for name in copies]
    wait = [f"compute waits for {name}" for name in copies]
    assert events == [
        *(*begin[0], wait[0], *begin[1], "embeddings computes"),
        *(wait[1], *begin[2], "layer 0 computes"),
        *(wait[2], *begin[3], "layer 1 computes"),
        *(wait[3], "head computes"),
    ]


def test_a_forward_that_raises_leaves_the_weights_in_host_memory_and_the_next_one_works(monkeypatch):
    model = tiny_model(layers=4)
    expected = logits_of(model)
    streamed, mover, _ = offloaded(monkeypatch, model)
    stored = dict(streamed.named_parameters())
    logits_of(streamed)

    def fail(*_):
        raise ZeroDivisionError

    hook = streamed.model.layers[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        logits_of(streamed)
    assert mover.live_bytes == 0
    assert all(p is stored[name] for name, p in streamed.named_parameters())
    hook.remove()
    for _ in range(2):
        assert logits_of(streamed).equal(expected)
    assert mover.most_bytes == most_streamed_bytes(model, layers_of(model), LEAST)


def test_units_in_another_order_than_before_are_loaded_when_they_run(monkeypatch):
    model = tiny_model(layers=4)
    streamed, mover, _ = offloaded(monkeypatch, model)
    logits_of(streamed)
    for each in (model, streamed):
        each.model.layers = each.model.layers[::-1]
    for _ in range(2):
        assert logits_of(streamed).equal(logits_of(model))
    assert mover.most_bytes == most_streamed_bytes(model, layers_of(model), LEAST)


def test_log_probs_of_a_streamed_head_are_the_resident_ones(monkeypatch):
    positions_T = torch.tensor([1, 2, 7])
    request = HeadRequest(positions_T, IDS.flatten()[positions_T + 1], temperature=0.7, chunk_size=2, entropy=True)
    model = install_head(tiny_model())
    with torch.no_grad():
        expected = model(input_ids=IDS, head_request=request)
        streamed, _, _ = offloaded(monkeypatch, model)
        for _ in range(2):
            found = streamed(input_ids=IDS, head_request=request)
            assert all(found[name].equal(values) for name, values in expected.items())


def test_a_cpu_whose_memory_is_the_hosts_keeps_the_model_as_it_is():
    model = tiny_model()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    frozen = Replicated(Accelerator(cpu=True)).prepare_frozen(model, 1 << 40, on_host=True)
    with frozen.ready() as ready:
        assert {name: p.data_ptr() for name, p in ready.named_parameters()} == before
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_of_small_layers_alone_streams_nothing():
    model = nn.Linear(2, 2)
    assert most_streamed_bytes(model, [model], 1 << 20) == 0

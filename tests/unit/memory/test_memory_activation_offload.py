"""Offloaded activations give the same losses, gradients and weights."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from benchmarks.harness.caching_allocator import AllocatedFakes, CachingAllocator
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cpu_as_device import streaming_mover
from lowpeak import RLOOConfig, RLOOTrainer
from lowpeak.memory.activation_offload import ActivationOffload
from tiny_models import char_tokenizer, tiny_model


class CountingMover:
    """Copies within the CPU's memory; it knows what is away and what has come back."""

    device = torch.device("cpu")

    def __init__(self):
        self.went = []
        self.hosts = []
        self.came = 0
        self.here = []
        self.most_here = 0

    def to_host(self, flat):
        self.went.append(flat.numel())
        host = flat.clone()
        self.hosts.append(weakref.ref(host))
        return host

    def to_device(self, host):
        self.came += 1
        flat = host.clone()
        self.here = [*(ref for ref in self.here if ref() is not None), weakref.ref(flat)]
        self.most_here = max(self.most_here, len(self.here))
        return flat

    def wait(self, flat):
        pass


def test_the_computing_stream_waits_for_a_copy_before_its_memory_is_free(monkeypatch):
    mover, events = streaming_mover(monkeypatch)
    flats = [torch.ones(8) for _ in range(4)]
    gone = [weakref.ref(flat) for flat in flats]
    hosts = []
    for number in range(4):
        hosts.append(mover.to_host(flats.pop(0)))
        assert [ref() is None for ref in gone] == [index < number - 1 for index in range(4)]
    with FakeTensorMode(allow_non_fake_inputs=True):  # which copies from host memory without data
        arriving = [mover.to_device(host) for host in hosts[:2]]
    assert all(ref() is None for ref in gone)
    events.clear()
    mover.wait(arriving[1])
    mover.wait(arriving[1])
    assert events == ["compute waits for copy 6"]
    mover.to_host(torch.ones(8))  # whatever arrived for a graph that is lost
    assert events[1:] == ["compute waits for copy 5", "copy waits for compute", "copy 7 begins"]


def peaks_of_a_step(mover=None):
    """The bytes that are allocated and reserved at most on a device with torch's allocator, in a step of wide layers."""
    allocator = CachingAllocator()
    with FakeTensorMode(allow_non_fake_inputs=True):
        layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
        with AllocatedFakes(allocator):
            hidden = torch.ones(16_384, 1024)
            offload = ActivationOffload(layers, mover) if mover else None
            with offload.saving() if offload else nullcontext():
                for layer in layers:
                    hidden = layer(hidden)
                hidden = hidden.sum()
            hidden.backward()
    return allocator.most_allocated, allocator.reserved


def test_reserved_memory_falls_with_what_is_allocated(monkeypatch):
    mover, _ = streaming_mover(monkeypatch)
    allocated, reserved = peaks_of_a_step()
    less_allocated, less_reserved = peaks_of_a_step(mover)
    assert allocated - less_allocated > 0.5 * allocated
    assert reserved - less_reserved > 0.8 * (allocated - less_allocated)


def offload_of(model, least_bytes=1):
    mover = CountingMover()
    return ActivationOffload(model, mover, least_bytes), mover


def gradients(model, saving):
    model.zero_grad()
    ids = torch.arange(2, 12).reshape(2, 5)
    with saving:
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [True, False])
def test_loss_and_gradients_are_the_same_bits(checkpointing):
    model = tiny_model(layers=4, hidden=32).train()
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    offload, mover = offload_of(model)
    plain_loss, plain = gradients(model, nullcontext())
    loss, found = gradients(model, offload.saving())
    assert loss.equal(plain_loss)
    assert all(found[name].equal(grad) for name, grad in plain.items())
    assert offload.offloaded_bytes == sum(mover.went) > 0
    if checkpointing:
        inputs = 2 * 5 * 32 * 4  # of a layer: rows x tokens x hidden x bytes
        assert 4 <= mover.went.count(inputs) <= 4 + 4  # the last norm, which is not checkpointed, saves a few


def test_parameters_and_their_views_and_small_tensors_stay():
    model = nn.Linear(8, 8)
    offload, mover = offload_of(model)
    with offload.saving():
        loss = (model(torch.ones(1, 8)) @ model.weight.t()[:, :2]).sum()
    loss.backward()
    assert mover.went == [8 * 4, 8 * 4]  # the two products' inputs: neither the weight nor its transpose
    offload, mover = offload_of(model, least_bytes=8 * 4 + 1)
    with offload.saving():
        model(torch.ones(1, 8)).sum().backward()
    assert mover.went == []


def test_views_of_one_storage_are_copied_once():
    model = nn.Linear(1, 1)
    offload, mover = offload_of(model)
    x = torch.rand(4, 6, requires_grad=True)
    with offload.saving():
        y = x * 1.0
        loss = (y.t() @ y).sum() + (y[1:] * y[:-1]).sum()
    plain = torch.autograd.grad((x.t() @ x).sum() + (x[1:] * x[:-1]).sum(), x)[0]
    assert torch.autograd.grad(loss, x)[0].equal(plain)
    assert mover.went == [4 * 6 * 4]


def test_a_storage_that_was_written_to_in_between_is_copied_again():
    model = nn.Linear(1, 1)
    offload, mover = offload_of(model)
    x, w = torch.full((8,), 3.0), torch.ones(8, requires_grad=True)
    with offload.saving():
        first = w * x
        x.add_(1.0)  # autograd would refuse the saved x; its copy was made before
        second = w * x
    assert torch.autograd.grad(first.sum() + second.sum(), w)[0].tolist() == [7.0] * 8
    assert len(mover.went) == 2


def test_at_most_two_storages_are_on_the_device_and_host_memory_is_free_after_the_backward():
    scale = nn.Parameter(torch.full((64,), 1.01))
    offload, mover = offload_of(nn.ParameterList([scale]))
    x = torch.rand(64)
    with offload.saving():
        for _ in range(12):  # products, each of which saves its input
            x = (x * scale).sin()
        loss = x.sum()
    del x
    assert mover.came == 0
    loss.backward(retain_graph=True)  # so that the graph holds on to all that it saved
    assert mover.came >= len(mover.went) > 12
    assert mover.most_here <= 3  # the one of the node that runs, the one just asked for, the one ahead
    assert all(host() is not None for host in mover.hosts)
    loss.backward()
    del loss
    assert all(host() is None for host in mover.hosts)


def trained(tmp_path, tied, offloads):
    """The weights after two steps of RLOO, whose losses visit the head again in backward; and the bytes moved."""
    args = RLOOConfig(output_dir=str(tmp_path), use_cpu=True, max_completion_length=4, max_steps=2, report_to="none")
    model = tiny_model(tied=tied)
    offload, _ = offload_of(model)
    data = [{"prompt": f"{i}="} for i in range(8)]
    reward = lambda completions, **_: [float(len(text)) for text in completions]  # noqa: E731
    trainer = RLOOTrainer(model, reward, args, data, processing_class=char_tokenizer())
    if offloads:
        settings = replace(trainer.run.logprob_settings, activation_context=offload.saving)
        trainer.run = replace(trainer.run, logprob_settings=settings)
    trainer.train()
    return dict(model.named_parameters()), offload.offloaded_bytes


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_run_with_offloaded_activations_trains_the_same_weights(tied, tmp_path):
    there, _ = trained(tmp_path / "there", tied, offloads=False)
    offloaded, moved = trained(tmp_path / "away", tied, offloads=True)
    assert moved > 0
    for name, weight in there.items():
        assert torch.equal(weight, offloaded[name]), name

"""A rehearsal without ranks, weights or devices: it counts what real tensors take, and answers for models of any size."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from transformers import Qwen2Config

from case_selection import mark_extended
from lowpeak.arguments.storage import StorageFormat
from lowpeak.errors import ArgumentError
from lowpeak.memory.usage import Kind
from lowpeak.plan.rehearsal.fake_ranks import fake_process_group, make_mesh, wrap_shape_propagation
from lowpeak.plan.rehearsal.rehearsal import rehearse
from lowpeak.plan.rehearsal.rehearsal_inputs import MeshShape, RehearsalInputs
from lowpeak.plan.rehearsal.storage_meter import StorageMeter
from rehearsal_cases import ALGORITHM, CORE, make_model, micro_batches

GB = 10**9
RESIZE = torch.UntypedStorage.resize_
SMALL = Qwen2Config(
    vocab_size=1_000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=128, tie_word_embeddings=True,
)  # fmt: skip
LARGE = Qwen2Config(
    vocab_size=152_064, hidden_size=3_584, num_hidden_layers=12, num_attention_heads=28, num_key_value_heads=4,
    intermediate_size=18_944, tie_word_embeddings=False, max_position_embeddings=8_192,
)  # fmt: skip
# Its states have blocks of 128 values: 64M parameters, of which few are below 4,096 in a tensor.
WIDE = Qwen2Config(
    vocab_size=8_192, hidden_size=1_024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    intermediate_size=4_096, tie_word_embeddings=True,
)  # fmt: skip
BATCHES = micro_batches(8, 8, 4, 40)
SCORING = replace(ALGORITHM, needs=frozenset(("old",)))


def checkpointed():
    model = make_model(LARGE)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.extended
def test_64_ranks_of_a_model_of_15_gb_answer_at_once():
    batches, core = micro_batches(512, 1536, 1, 2048), replace(CORE, chunk_size=256)
    found = rehearse(
        RehearsalInputs(checkpointed, batches, SCORING, core, mesh_shape=MeshShape(64), compute=torch.bfloat16)
    )
    with torch.device("meta"):
        num_bytes = sum(p.nbytes for p in make_model(LARGE).parameters())
    assert num_bytes > 15 * GB
    assert found.peak("load") == pytest.approx(num_bytes / 64, rel=0.01)
    assert found.peak("optimizer") == pytest.approx(4 * num_bytes / 64, rel=0.01)  # weights, gradients, AdamW's two
    head = 152_064 * 3_584 * 2
    assert found.peak("score") > 3 * num_bytes / 64 + head  # weights, AdamW's states, the head gathered in bf16
    # and its gradient, far from all weights
    assert 3 * num_bytes / 64 + 2 * head < found.peak("forward", "backward") < 8 * GB


@pytest.mark.extended
def test_a_rank_holds_its_share_of_weights_gradients_and_both_states():
    one, four = (
        rehearse(RehearsalInputs(lambda: make_model(SMALL), BATCHES, SCORING, CORE, mesh_shape=MeshShape(shards)))
        for shards in (1, 4)
    )
    assert one.peak("optimizer") == pytest.approx(4 * one.peak("load"), rel=0.05)
    assert one.peak("forward", "backward") > one.peak("score") > 3 * one.peak("load")
    assert four.peak("load") == pytest.approx(one.peak("load") / 4, rel=0.1)
    assert four.peak("optimizer") < 0.5 * one.peak("optimizer")
    assert not dist.is_initialized()
    many = rehearse(RehearsalInputs(lambda: make_model(SMALL), micro_batches(8, 64, 4, 1000), SCORING, CORE))
    assert many.peak("forward") > one.peak("forward")
    assert many.peak("optimizer") == one.peak("optimizer")


def test_a_frozen_reference_is_sharded_as_the_policy_is():
    small = partial(make_model, SMALL)
    found = rehearse(
        RehearsalInputs(small, BATCHES, ALGORITHM, CORE, MeshShape(4), make_reference=small, updates=False)
    )
    loaded = found.phases["load"].device
    assert loaded[Kind.FROZEN] == loaded[Kind.WEIGHTS] > 0


@pytest.mark.extended
def test_replicas_have_one_gradient_of_each_parameter_however_many_micro_batches_a_step_has():
    batches = micro_batches(8, 64, 4, 100)
    assert len(batches) > 1
    one, two = (
        rehearse(RehearsalInputs(lambda: make_model(WIDE), batches, ALGORITHM, CORE, mesh_shape=MeshShape(1, number)))
        for number in (1, 2)
    )
    piece = 4 << 22  # bytes of the small gradients that are averaged together
    assert one.peak("backward") <= two.peak("backward") <= one.peak("backward") + piece


@cache
def bytes_per_parameter(storage: StorageFormat, world_size: int) -> dict[str, float]:
    """What each phase of a step of WIDE takes on all ranks together, for each of its parameters."""
    wide, mesh = partial(make_model, WIDE), MeshShape(world_size)
    found = rehearse(RehearsalInputs(wide, BATCHES, SCORING, CORE, mesh_shape=mesh, storage=storage))
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in wide().parameters())
    numbers = {name: phase.peak for name, phase in found.phases.items()}
    numbers |= {"host": found.phases["optimizer"].host_peak, "to_host": found.to_host, "to_device": found.to_device}
    numbers |= {"batches_to_host": found.batches_to_host}
    return {name: value * world_size / num_parameters for name, value in numbers.items()}


@pytest.mark.parametrize(
    ("bits", "low_bytes", "world_size"), mark_extended([(32, 2, 4), (24, 1, 4), (16, 0, 1)], [(24, 1, 4)])
)
def test_a_storage_format_takes_its_bytes(bits, low_bytes, world_size):
    found = bytes_per_parameter(StorageFormat(bits, 8), world_size)
    assert found["load"] == pytest.approx(2, rel=0.01)
    floor = 2 + 2 + low_bytes + 2.0625
    # Above it small tensors' fp32 states, and a piece of 2**18 values that torch's operations decode.
    assert floor < found["optimizer"] < floor + 0.1 + world_size * 12e6 / 67e6
    assert found["host"] == 0


@pytest.mark.extended
@pytest.mark.parametrize("world_size", [1, 4])
def test_an_offloaded_optimizer_leaves_the_weights_on_the_device(world_size):
    found = bytes_per_parameter(StorageFormat(32, 8, 32, offload=True), world_size)
    state_bytes = bytes_per_parameter(StorageFormat(32, 8), world_size)
    assert found["load"] == pytest.approx(2, rel=0.01)
    assert state_bytes["score"] - found["score"] == pytest.approx(2 + 2.0625, rel=0.02)
    assert state_bytes["backward"] - found["backward"] > 4
    assert found["host"] == pytest.approx(4 + 2 + 2.0625, rel=0.02)
    assert found["to_device"] == pytest.approx(found["host"], rel=0.01)
    # On one device the head's stripes are fp32.
    of_head = 2 * WIDE.vocab_size * WIDE.hidden_size / 67e6 if world_size == 1 else 0
    assert found["batches_to_host"] == pytest.approx((2 + of_head) * len(BATCHES), rel=0.03)
    assert found["to_host"] == pytest.approx(2 + 2.0625, rel=0.03)


def test_the_former_name_names_the_new_one():
    with pytest.raises(ImportError, match=r"lowpeak\.plan\.rehearse"):
        from lowpeak.memory import rehearse as _  # noqa: F401


def test_a_phase_that_reads_a_value_is_refused():
    def reading(logprobs_T, tokens):
        return logprobs_T * logprobs_T.sum().item()

    with pytest.raises(DataDependentOutputException):
        rehearse(RehearsalInputs(lambda: make_model(SMALL), BATCHES, replace(ALGORITHM, loss=reading), CORE))
    assert torch.UntypedStorage.resize_ is RESIZE


def test_connected_ranks_cannot_rehearse():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ArgumentError):
            rehearse(RehearsalInputs(lambda: make_model(SMALL), BATCHES, ALGORITHM, CORE, mesh_shape=MeshShape(2)))
    finally:
        dist.destroy_process_group()


def test_a_storage_counts_once_in_blocks_at_its_size_while_it_lives():
    with StorageMeter() as meter:
        tensor = torch.zeros(300)  # 1,200 bytes
        view = tensor.view(2, 150)[0]
        del tensor
        assert meter.live_bytes == 1536
        meter.begin("freed")
        view.untyped_storage().resize_(0)
        meter.begin("grown")
        view.untyped_storage().resize_(8192)
        meter.begin(None)
        del view
    assert meter.live_bytes == 0
    assert {phase: peak.total() for phase, peak in meter.peaks.items()} == {"freed": 1536, "grown": 8192}


def test_each_byte_has_the_kind_that_was_current_or_that_it_was_given():
    with StorageMeter(1) as meter:
        meter.begin("one", Kind.WEIGHTS)
        weights = torch.zeros(100)
        with meter.counting_as(Kind.LOGITS):
            logits = torch.zeros(50)
        meter.retag(logits, Kind.GRADIENTS)
        meter.begin("two")
        more = torch.zeros(25)
        meter.begin(None)
    assert meter.peaks["one"] == {Kind.WEIGHTS: 400, Kind.LOGITS: 200}
    assert +meter.peaks["two"] == {Kind.WEIGHTS: 400, Kind.GRADIENTS: 200, Kind.ACTIVATIONS: 100}
    assert meter.live.total() == meter.live_bytes == weights.nbytes + logits.nbytes + more.nbytes
    assert torch.UntypedStorage.resize_ is RESIZE


def test_gradients_that_meet_are_added_in_place():
    weight = torch.zeros(1 << 16, requires_grad=True)
    with StorageMeter() as meter:
        loss = (weight * 2).sum() + (weight * 3).sum()
        meter.begin("backward")
        loss.backward()
        meter.begin(None)
    assert meter.peaks["backward"].total() < 2.5 * weight.nbytes


def test_a_fake_of_a_whole_tensor_from_which_dtensor_learns_a_layout_is_nobodys():
    size = 1 << 20  # bytes of each of four ranks' rows
    with fake_process_group(4):
        mesh = make_mesh(4)
        with FakeTensorMode(), StorageMeter() as meter, wrap_shape_propagation(meter.paused):
            cut = DTensor.from_local(torch.empty(256, 1024), mesh, (Shard(0),))
            meter.begin("exp")
            out = cut.exp()
            meter.begin(None)
    assert out.shape == (1024, 1024)
    assert meter.peaks["exp"].total() == 2 * size

"""Tensors that are offloaded during a rollout return to the same storages with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cpu_as_device import CopyingMover
from lowpeak.errors import MemoryExhaustedError
from lowpeak.memory.rollout_offload import RolloutOffloader


def trained():
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    return model, optimizer


def states(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()]


def rest_of(model, optimizer, mover=None, least_bytes=64):
    return RolloutOffloader(mover or CopyingMover(), model.parameters, lambda: states(optimizer), least_bytes)


def nbytes(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_states_are_offloaded_during_a_rollout_and_the_same_bits_after_it():
    model, optimizer = trained()
    before = [value.clone() for value in states(optimizer)]
    counts = [value for value in states(optimizer) if value.numel() == 1]
    rest = rest_of(model, optimizer)
    with rest.offloaded():
        assert nbytes(states(optimizer)) == nbytes(counts)
        assert nbytes(model.parameters()) == (16 * 16 + 16) * 4
    assert all(now.equal(then) for now, then in zip(states(optimizer), before, strict=True))
    offloaded_bytes, seconds = rest.pop_usage()
    assert offloaded_bytes == 2 * (16 * 16 + 16) * 4
    assert seconds > 0
    assert rest.pop_usage() == (0, 0.0)


def test_views_of_a_buffer_share_it_again_after_a_rollout():
    flat = torch.arange(64.0)
    part = flat[16:32].view(4, 4)
    rest = RolloutOffloader(CopyingMover(), list, lambda: [part, flat], 1)
    with rest.offloaded():
        assert flat.untyped_storage().nbytes() == 0
    assert rest.offloaded_bytes == 64 * 4  # once, although two tensors are on it
    part.add_(100.0)
    assert flat[16:32].tolist() == [116.0 + i for i in range(16)]


def test_a_storage_of_the_policy_stays_on_the_device():
    policy = torch.arange(64.0)
    rest = RolloutOffloader(CopyingMover(), lambda: [policy], lambda: [policy[:32]], 1)
    with rest.offloaded():
        assert policy.sum() == 63 * 32
    assert rest.offloaded_bytes == 0


def test_a_reward_model_is_on_the_device_while_it_is_used_and_offloaded_again():
    judge, optimizer_state = torch.arange(8.0), torch.ones(8)
    rest = RolloutOffloader(CopyingMover(), list, lambda: [optimizer_state], 1)
    rest.add(lambda: [judge])
    with rest.on_device(lambda: [judge]):
        assert judge.tolist() == list(range(8))
    assert rest.offloaded_bytes == 0  # it was not away
    with rest.offloaded():
        assert nbytes([judge, optimizer_state]) == 0
        with rest.on_device(lambda: [judge]):
            assert judge.tolist() == list(range(8))
            assert nbytes([optimizer_state]) == 0
        assert nbytes([judge, optimizer_state]) == 0
    assert judge.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("mover", "pattern"),
    [(CopyingMover(), "engine"), (CopyingMover(room=16 * 16 * 4), "offload_during_rollout")],
    ids=["an error in the rollout", "a full host"],
)
def test_all_tensors_return_after_an_error(mover, pattern):
    model, optimizer = trained()
    before = [value.clone() for value in states(optimizer)]
    kind = KeyError if pattern == "engine" else MemoryExhaustedError
    with pytest.raises(kind, match=pattern), rest_of(model, optimizer, mover).offloaded():
        raise KeyError("engine")
    assert all(now.equal(then) for now, then in zip(states(optimizer), before, strict=True))

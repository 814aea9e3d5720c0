"""Metrics carry their own reduction, and lose nothing on the way."""

from __future__ import annotations

import pytest
import torch

from lowpeak.records import Forest, Metric, MicroBatch, TokenBatch


@pytest.mark.parametrize("numbers", [(2.0**40 + 1, 2.0**40 + 3), (2.0, torch.tensor(3.0))])
def test_extremes_of_numbers_and_tensors_are_exact(numbers):
    for kind, kept in zip(("min", "max"), numbers, strict=True):
        first, second = (Metric(number, 1.0, kind) for number in numbers)
        assert first.merge(second).value() == second.merge(first).value() == kept


@pytest.mark.parametrize(("device", "pins"), [("cuda", True), ("mps", False), ("cpu", False)])
def test_a_micro_batch_is_pinned_for_a_device_with_its_own_memory(monkeypatch, device, pins):
    copied = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    monkeypatch.setattr(torch.Tensor, "to", lambda self, to, non_blocking: copied.append((self, to, non_blocking)))
    ids = torch.ones(1, 3, dtype=torch.int64)
    tokens = TokenBatch(ids[0], 1, ids[0].float(), ids[0].float())
    MicroBatch(ids, ids[0], ids[0], tokens, (0,), 3, Forest((), ids)).to(device)
    assert len(copied) == 7
    assert {(str(to), non_blocking) for _, to, non_blocking in copied} == {(device, True)}
    assert all((each.untyped_storage()._cdata == ids.untyped_storage()._cdata) != pins for each, *_ in copied[:3])

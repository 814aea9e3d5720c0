"""The self test uses every transport that reaches the workers, and tells which one failed."""

from __future__ import annotations

import torch

from fused import FusedModel, FusedVllm, slices, weights
from lowpeak.rollout.vllm.weights.selftest import selftest

CPU = torch.device("cpu")


def _slices(version):
    return slices(weights(version))


def test_an_engine_of_this_process_is_reached_by_three_transports():
    vllm = FusedVllm()
    found = selftest([vllm], _slices, CPU)
    assert [each.transport for each in found] == ["process", "shm", "tcp"]
    assert [each.error for each in found] == [None] * 3
    assert all(each.report is not None and each.report.num_tensors == 6 for each in found)
    assert torch.equal(vllm.model.norm.data, weights(3)["norm.weight"])


def test_an_engine_of_another_process_is_reached_by_two():
    assert [each.transport for each in selftest([FusedVllm(in_process=False)], _slices, CPU)] == ["shm", "tcp"]


class LosesBits(FusedModel):
    """Rounds one parameter."""

    def load_weights(self, weights):
        super().load_weights(weights)
        self.norm.data.copy_(self.norm.data.bfloat16())


def test_a_transport_whose_weights_cannot_be_proved_is_told_with_the_reason():
    found = selftest([FusedVllm(LosesBits())], _slices, CPU)
    assert all(each.report is None and "norm" in each.error for each in found)

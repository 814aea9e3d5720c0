"""The self-test pushes over every transport that reaches the workers, and names those that failed."""

from __future__ import annotations

import re

import pytest
import torch

from fused import FusedModel, FusedVllm, slices, weights
from lowpeak.selftest.engines import push_over_each
from lowpeak.selftest.table import MismatchError

CPU = torch.device("cpu")


def pushed(vllm):
    """The transports that worked, in order."""
    return re.findall(r"(\w+) \d+ ms", push_over_each([vllm], lambda version: slices(weights(version)), CPU))


def test_an_engine_of_this_process_is_reached_by_two_transports():
    vllm = FusedVllm()
    assert pushed(vllm) == ["process", "tcp"]
    assert torch.equal(vllm.model.norm.data, weights(2)["norm.weight"])


def test_an_engine_of_another_process_is_reached_by_tcp():
    assert pushed(FusedVllm(in_process=False)) == ["tcp"]


class LosesBits(FusedModel):
    """Rounds one parameter."""

    def load_weights(self, weights):
        super().load_weights(weights)
        self.norm.data.copy_(self.norm.data.bfloat16())


def test_transports_whose_weights_cannot_be_proved_are_named_with_the_reason():
    with pytest.raises(MismatchError, match=r"process: .*norm.*; tcp: .*norm"):
        pushed(FusedVllm(LosesBits()))

"""Each row of the self-test on a CPU, at a small size: what it compares agrees here, and what is broken is found."""

from __future__ import annotations

import re

import pytest
import torch

from fused_model import FusedModel, FusedVllm, slices, weights
from lowpeak.selftest import (
    Bench,
    MismatchError,
    forest_attention,
    grpo_learns,
    loading,
    logprob_core,
    push_over_each,
    resume,
    same_run,
    step_memory,
)


@pytest.fixture
def bench(tmp_path):
    return Bench(torch.device("cpu"), tmp_path)


@pytest.mark.parametrize(
    ("row", "numbers"),
    [
        (logprob_core, r"fp32: log-probs within .+; bf16: .+; bf16, soft-cap and entropy: .+ MiB\)"),
        (forest_attention, r".+ bf16 .+ fp32 .+"),
        (step_memory, r"\S+ MiB above the weights \(\S+ MiB planned\)"),
        (loading, r"\S+ MiB on the device, equal to the file"),
        (resume, r"the same bits; \S+ s and .+ MiB per step, .+\(without: .+\)"),
        (grpo_learns, r"reward 0\.\d+ at first and \S+ after 30 steps, \S+ s per step, .+"),
    ],
)
def test_a_row_gives_its_numbers(bench, row, numbers):
    assert re.fullmatch(numbers, row(bench))


def test_a_run_that_differs_is_found(bench):
    with pytest.raises(MismatchError, match=r" 0\.0e"):
        same_run(bench, {"learning_rate": 6e-4}, max_steps=1)


def pushed(vllm):
    """Push over each transport; return the transports that worked, in order."""
    told = push_over_each([vllm], lambda version: slices(weights(version)), torch.device("cpu"))
    return re.findall(r"(\w+) \d+ ms", told)


def test_a_push_goes_over_every_transport_that_reaches_the_engine():
    vllm = FusedVllm()
    assert pushed(vllm) == ["process", "tcp"]
    assert torch.equal(vllm.model.norm.data, weights(2)["norm.weight"])
    assert pushed(FusedVllm(in_process=False)) == ["tcp"]


class LosesBits(FusedModel):
    """Rounds one parameter."""

    def load_weights(self, weights):
        super().load_weights(weights)
        self.norm.data.copy_(self.norm.data.bfloat16())


def test_transports_whose_weights_cannot_be_verified_are_named():
    with pytest.raises(MismatchError, match=r"process: .*norm.*; tcp: .*norm"):
        pushed(FusedVllm(LosesBits()))

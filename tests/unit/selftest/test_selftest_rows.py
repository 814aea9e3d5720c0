"""Each row of the self-test on a CPU, at a small size: what it compares agrees here, and what is broken is found."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from case_selection import mark_extended
from fused_model import FusedModel, FusedVllm, slices, weights
from lowpeak.selftest.decode import decoding
from lowpeak.selftest.kernels import (
    forest_attention,
    head_sizes,
    large_head,
    logprob_core,
    storage_formats,
    teacher_divergence,
)
from lowpeak.selftest.memory import loading, memory_budget, step_memory
from lowpeak.selftest.offload import large_frozen, large_optimizer, offloaded_run
from lowpeak.selftest.oom import oom_rollout, oom_training
from lowpeak.selftest.runs import same_run
from lowpeak.selftest.table import Bench, MismatchError
from lowpeak.selftest.training import four_bits, grpo_learns, lora, resume
from lowpeak.selftest.vllm import push_over_each


@pytest.fixture
def bench(tmp_path):
    return Bench(torch.device("cpu"), tmp_path)


ROWS = [
    (large_head, r"log-probs within .+ MiB\)"),
    (teacher_divergence, r"(beta \S+ in \S+: within \S+, gradients \S+(; )?){6}"),
    (head_sizes, r".+ \(64, 128, 256\)"),
    (storage_formats, r"fp32/32: .+; fp32/8: .+; 32/32: .+; 32/8: .+; 24/8: .+; 16/8: .+"),
    (memory_budget, r"at most \S+ MiB of \S+ MiB, with micro_batch_tokens \d+ and kv_cache_bytes \d+"),
    (decoding, r"\S+ ms per step \(first \S+, top_p \S+, planned \S+\), \S+ tokens/s, .+ backends: .+"),
    (oom_training, r"recovered, 1 times: micro_batch_tokens 1048576 -> 128 .+"),
    (oom_rollout, r"recovered, 1 times: kv_cache_bytes 8589934592 -> \d+ .+"),
    (lora, r"28 weights of the adapter .+"),
    (four_bits, r"28 weights of the adapter .+"),
    (partial(offloaded_run, flag="offload_optimizer"), r"the same bits; .+"),
    (large_optimizer, r"\S+B parameters: \S+ s per micro-batch, \S+ s per optimizer step, \d+ host threads, .+"),
    (large_frozen, r"a forward of 16 tokens takes \S+ ms \(\S+ ms with its \S+ MiB on the device\), .+"),
    (logprob_core, r"fp32: log-probs within .+; bf16: .+; bf16, soft-cap and entropy: .+ MiB\)"),
    (forest_attention, r".+ bf16 .+ fp32 .+"),
    (step_memory, r"\S+ MiB above the weights \(\S+ MiB planned\)"),
    (loading, r"\S+ MiB on the device, equal to the file"),
    (resume, r"the same bits; \S+ s and .+ MiB per step, .+\(without: .+\)"),
    (grpo_learns, r"reward 0\.\d+ at first and \S+ after 30 steps, \S+ s per step, .+"),
]
CORE = [case for case in ROWS if case[0] in (storage_formats, oom_training, lora)]


@pytest.mark.parametrize(("row", "numbers"), mark_extended(ROWS, CORE))
def test_a_row_gives_its_numbers(bench, row, numbers):
    assert re.fullmatch(numbers, row(bench))
    assert bench.numbers or row in (forest_attention, loading)


@pytest.mark.extended
def test_a_run_that_differs_is_found(bench):
    with pytest.raises(MismatchError, match=r" 0\.0e"):
        same_run(bench, {"learning_rate": 6e-4}, max_steps=1)


def pushed(vllm):
    """Push over each transport; return the transports that worked, in order."""
    report = push_over_each([vllm], lambda version: slices(weights(version)), torch.device("cpu"))
    return re.findall(r"(\w+) \d+ ms", report)


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

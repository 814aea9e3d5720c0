"""Each row of the self-test on a CPU, at a small size: what it compares agrees here, and what is broken is found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowpeak.selftest import engines, kernels, memory, runs
from lowpeak.selftest.table import Bench, MismatchError
from movers import CopyingMover

SOURCE = str(Path(__file__).parents[3] / "src")


class Copies:
    """The CPU's memory as host and device of activations."""

    device = torch.device("cpu")

    def away(self, flat):
        return flat.clone()

    def back(self, host):
        return host.clone()

    def wait(self, flat):
        pass


class Loses(Copies):
    """Brings zeros back."""

    def back(self, host):
        return torch.zeros_like(host)


@pytest.fixture
def bench(tmp_path):
    return Bench(torch.device("cpu"), tmp_path)


@pytest.mark.parametrize(
    ("row", "numbers"),
    [
        (kernels.logprob_core, r"fp32: log-probs within .+; bf16: .+; bf16, soft-cap and entropy: .+ MiB\)"),
        (kernels.wide_products, r"\de-0\d off \(bf16 results \de-03\), .+ TFLOP/s"),
        (kernels.forest_attention, r"a prompt of 24 with 4 x 8 tokens, both ways: .+ ms \(padded rows .+\)"),
        (memory.step_memory, r".+ above the weights \(.+ planned, .+ with whole logits\)"),
        (memory.loading, r".+ in .+ s, the host's own memory grew by .+ at most"),
        (engines.native_engine, r"16 of 16 greedy completions are a CPU's; 16 rows: .+ tokens/s"),
        (engines.weight_transports, r".+ arrived as they were: tcp .+ GB/s"),
        (runs.offload_frozen_models, r"the same bits; .+ on the device while it generates .+"),
        (runs.resume, "the same bits"),
        (engines.collectives, r".+ of each of 2 ranks: all-reduce .+ GB/s, all-gather .+ GB/s"),
    ],
)
def test_a_row_gives_its_numbers(bench, row, numbers):
    assert re.fullmatch(numbers, row(bench))


def test_the_triton_kernels_give_their_numbers(tmp_path):
    program = (
        "import sys, torch; from pathlib import Path; from lowpeak.selftest.kernels import logprob_kernels; "
        "from lowpeak.selftest.table import Bench; print(logprob_kernels(Bench(torch.device('cpu'), Path(sys.argv[1]))))"
    )
    settings = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": SOURCE}
    command = [sys.executable, "-c", program, str(tmp_path)]
    found = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    assert "logits: plain " in found.stdout


def test_activations_that_come_back_otherwise_are_found(bench):
    assert re.match(r".+ left and came back, gradients 0e\+00 apart, peak", memory.activation_offload(bench, Copies()))
    with pytest.raises(MismatchError, match=r"gradients are .+ apart"):
        memory.activation_offload(bench, Loses())


def test_states_that_come_back_otherwise_are_found(bench):
    numbers = runs.offload_during_rollout(bench, CopyingMover())
    assert re.match(r"the same bits; .+ left and came back in .+ s; .+ on the device meanwhile", numbers)


def test_a_run_that_differs_is_found(bench):
    class Forgets(CopyingMover):
        def back(self, host, flat):
            super().back(torch.zeros_like(host), flat)

    with pytest.raises(MismatchError, match=r"of their way apart, where the same run again gives 0\.0e"):
        runs.offload_during_rollout(bench, Forgets())


def test_grpo_learns_or_the_row_fails(bench):
    found = re.fullmatch(
        r"sampled accuracy (.+) before and (.+) after 20 steps, .+ s a step", runs.grpo_learns(bench, num_steps=20)
    )
    assert float(found[2]) > float(found[1])

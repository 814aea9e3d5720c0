"""The self-test's row of several ranks, with the command line that users start them by."""

from __future__ import annotations

import re

import pytest
import torch

from lowpeak.selftest.ranks import train_on_ranks
from lowpeak.selftest.table import Bench


@pytest.mark.release
def test_two_ranks_move_the_weights_as_one_process_does(tmp_path):
    numbers = train_on_ranks(Bench(torch.device("cpu"), tmp_path), "ddp")
    found = re.match(
        r"weights differ from those of one process by (\S+) of their movement; .+ s per step and .+ per rank", numbers
    )
    assert float(found[1]) < 1e-5

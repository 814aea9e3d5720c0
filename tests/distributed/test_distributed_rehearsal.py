"""A rehearsal of FSDP2 on two ranks says of its phases what two real ranks take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from spawn import launch

from lowpeak.memory.rehearsal import rehearse
from rehearsing import ALGORITHM, CORE, make_model, micro_batches

MB = 1e6


@pytest.mark.parametrize(("layout", "precision"), [("shared", "no"), ("rows", "bf16")])
def test_phases_differ_as_on_two_real_ranks(tmp_path: Path, layout: str, precision: str) -> None:
    launch("run_rehearsal.py", [str(tmp_path), layout, precision], timeout=120)
    rehearsed = rehearse(
        make_model,
        micro_batches(32, 32, 4, 128, layout),
        ALGORITHM,
        CORE,
        world_size=2,
        compute=torch.bfloat16 if precision == "bf16" else None,
    )
    for rank in (0, 1):
        real = json.loads((tmp_path / f"{layout}-{precision}-{rank}.json").read_text())
        constant = {phase: (real[phase] - getattr(rehearsed, phase)) / MB for phase in real}
        print(rank, constant, {phase: size / MB for phase, size in real.items()})
        assert max(constant.values()) - min(constant.values()) < 5, constant

"""A rehearsal of FSDP2 on two ranks says of its phases what two real ranks take."""

from __future__ import annotations

import json
from pathlib import Path

from spawn import launch

from lowpeak.memory.rehearsal import rehearse
from rehearsing import ALGORITHM, CORE, make_model, micro_batches

MB = 1e6  # what a process has beside tensors is the same in all phases


def test_phases_differ_as_on_two_real_ranks(tmp_path: Path) -> None:
    launch("run_rehearsal.py", [str(tmp_path)])
    rehearsed = rehearse(make_model, micro_batches(16, 16, 4, 64), ALGORITHM, CORE, world_size=2)
    for rank in (0, 1):
        real = json.loads((tmp_path / f"{rank}.json").read_text())
        assert real.keys() == {"score", "forward", "backward", "optimizer"}
        constant = {phase: (real[phase] - getattr(rehearsed, phase)) / MB for phase in real}
        assert max(constant.values()) - min(constant.values()) < 5, constant

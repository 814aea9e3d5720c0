"""A run that torchrun starts, whose rank 1 is killed in its first life: `run_elastic.py STRATEGY OUT`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from setups import build, prepare, spread, weights


def killed_once(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    """Rank 1 dies while it judges the fourth rollout, in the run's first life."""
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_life and os.environ["RANK"] == "1" and trainer_state.global_step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return spread(completions)


def main() -> None:
    """Train as the arguments of a first start say: nothing in them asks to resume."""
    strategy, out = sys.argv[1], Path(sys.argv[2])
    arguments = {**prepare(strategy), "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    trainer = build("GRPO", out / "run", arguments, rewards=killed_once)
    trainer.train()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    found = {"weights": weights(trainer), "restarts": restarts, "steps": trainer.state.global_step}
    if trainer.is_world_process_zero():
        (out / "result.json").write_text(json.dumps(found))


main()

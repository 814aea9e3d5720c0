"""A run that torchrun starts, whose rank 1 is killed, or runs out of memory, in its first life: `run_elastic.py STRATEGY OUT`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from setups import build, prepare, spread, weights


def killed_once(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    """Rank 1 dies while it judges the fourth rollout, in the run's first life."""
    if is_fatal(trainer_state):
        os.kill(os.getpid(), signal.SIGKILL)
    return spread(completions)


def is_fatal(state: Any) -> bool:
    return (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], state.global_step) == ("0", "1", 3)


def exhaust_once(trainer: Any) -> None:
    """Rank 1 runs out of memory in a layer of the fourth step, in the run's first life."""

    def raise_error(module: Any, args: Any) -> None:
        if module.training and is_fatal(trainer.state):
            raise torch.OutOfMemoryError("injected")

    trainer.model.model.layers[0].register_forward_pre_hook(raise_error)


def main() -> None:
    """Train as the arguments of a first start say: nothing in them asks to resume."""
    strategy, out = sys.argv[1], Path(sys.argv[2])
    is_killed = strategy == "fsdp2"
    arguments = {**prepare(strategy), "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    trainer = build("GRPO", out / "run", arguments, rewards=killed_once if is_killed else spread)
    if not is_killed:
        exhaust_once(trainer)
    trainer.train()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    found = {"weights": weights(trainer), "restarts": restarts, "steps": trainer.state.global_step}
    found["lowered"] = sorted(trainer.run.sizes.lowered)
    if trainer.is_world_process_zero():
        (out / "result.json").write_text(json.dumps(found))


main()

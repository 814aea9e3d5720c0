"""`lowpeak COMMAND ...` in a rank that some launcher started: FSDP2 on CPU for real, and what came of the run in a file.

`run_launched.py OUT COMMAND ...`; packages named in HIDE are not there, as on a machine without them. With more words in AGAIN
the command is run a second time, with these added. The last that it does is to say whether its process group is left.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

hidden = set(os.environ.get("HIDE", "").split(",")) - {""}
sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]  # no module: nobody finds it

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from setups import allow_meshes_on_cpu, weights_of  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

import lowpeak  # noqa: E402
from lowpeak.cli.commands import main  # noqa: E402


class Noting(TrainerCallback):
    """Writes what is in force, once the first step is done."""

    def __init__(self, trainer: Any, out: Path) -> None:
        self._trainer, self._out = trainer, out

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The parameters' type and mesh, the strategy, losses, weights."""
        trainer = self._trainer
        parameter = next(trainer.model.parameters())
        plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
        weights = weights_of(trainer)
        found = {
            "parameter": type(parameter).__name__,
            "placements": str(getattr(parameter, "placements", "")),
            "strategy": type(trainer.run.strategy).__name__,
            "world_size": trainer.run.strategy.ranks.world_size,
            "deepspeed": plugin.deepspeed_config if plugin is not None else None,
            "losses": [row["loss"] for row in state.log_history if "loss" in row],
            "absent": sorted(name for name in hidden if sys.modules.get(name) is None),
        }
        self._out.mkdir(parents=True, exist_ok=True)
        if state.is_world_process_zero:
            (self._out / "found.json").write_text(json.dumps(found, default=str))
            torch.save(weights, self._out / "weights.pt")


def run() -> int:
    """The command with trainers that note what they found."""
    out, kind, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    atexit.register(lambda: print(f"at exit in a process group: {dist.is_initialized()}\n", end="", flush=True))

    made = getattr(lowpeak, f"{kind.upper()}Trainer")

    def trainer(**keywords: Any) -> Any:
        allow_meshes_on_cpu()
        trainer = made(**keywords)
        trainer.add_callback(Noting(trainer, out))
        return trainer

    setattr(lowpeak, f"{kind.upper()}Trainer", trainer)
    status = main([kind, *words])
    again = os.environ.get("AGAIN", "").split()
    if status == 0 and again:
        print("again", flush=True)
        status = main([kind, *words, *again])
    return status


sys.exit(run())

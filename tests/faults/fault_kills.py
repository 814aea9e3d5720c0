"""How a run is killed at an exact moment: from outside the library, by hooks that anybody's script may have.

`KILLS` names the moments. Each process kills itself with SIGKILL, which no code of its own can answer.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fault_runs import Case, build, ones
from torch import nn
from transformers import TrainerCallback

Chosen = Callable[[str, tuple[Any, ...]], bool]


def kill() -> None:
    """End this process now."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_forward(trainer: Any, kind: str, step: int, nth: int = 1) -> None:
    """Kill inside the nth forward of the policy that generates ("rollout"), scores or trains, after `step` steps."""
    remaining = [nth]

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found = "rollout" if kwargs.get("use_cache") else "train" if torch.is_grad_enabled() else "score"
        if found == kind and trainer.state.global_step == step:
            _count(remaining)

    trainer.model.register_forward_pre_hook(hook, with_kwargs=True)


def kill_in_backward(trainer: Any, step: int) -> None:
    """Kill inside the backward pass of step `step` + 1, when the first layer's gradient is formed."""
    # No embedding: what hooks one takes its gradient by autograd's way, whose last bits differ.
    named = trainer.model.named_parameters()
    parameter = next(p for name, p in named if p.requires_grad and "embed" not in name)
    parameter.register_hook(lambda gradient: kill() if trainer.state.global_step == step else None)


class KillAfterOptimizer(TrainerCallback):
    """Kill when the optimizer has moved the weights and the step has not been counted."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Kill after `step` counted steps."""
        if state.global_step == self._step:
            kill()


def killing_reward(step: int) -> Callable[..., list[float]]:
    """A noisy judge that, once `step` steps are done, is killed after it has drawn its random numbers."""

    def ones_until_killed(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        values = ones(completions)
        if trainer_state.global_step == step:
            kill()
        return values

    return ones_until_killed


def kill_at_event(chosen: Chosen, nth: int = 1) -> None:
    """Kill right before the nth of Python's own events (audit hooks: opening, renaming, removing) that is chosen."""
    remaining = [nth]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "shutil.rmtree") and chosen(event, args):
            _count(remaining)

    sys.addaudithook(hook)


def opening(part: str) -> Chosen:
    """A file is opened whose path has `part` in it."""
    return lambda event, args: event == "open" and part in os.fsdecode(str(args[0]))


def appending(name: str) -> Chosen:
    """The file `name` is opened to append to it."""
    return lambda event, args: event == "open" and str(args[0]).endswith(name) and bool(args[2] & os.O_APPEND)


def renaming(source: str, target: str) -> Chosen:
    """A file or folder is renamed from a path that ends with `source` to one that ends with `target`."""
    return lambda event, args: event == "os.rename" and str(args[0]).endswith(source) and str(args[1]).endswith(target)


def after(first: Chosen, then: str) -> Chosen:
    """An event `then` after one that `first` chose."""
    seen = [False]

    def chosen(event: str, args: tuple[Any, ...]) -> bool:
        if seen[0]:
            return event == then
        seen[0] = first(event, args)
        return False

    return chosen


def _count(remaining: list[int]) -> None:
    remaining[0] -= 1
    if remaining[0] == 0:
        kill()


def run_killed_in_training(case: Case, place: Path, step: int) -> None:
    """A run that dies in the backward pass of step `step` + 1."""
    trainer = build(case, place / "run")
    kill_in_backward(trainer, step)
    trainer.train()


# In the STANDARD run.
KILLS: dict[str, Callable[[Any], None]] = {
    "rollout": lambda t: kill_in_forward(t, "rollout", 4, nth=3),
    "score": lambda t: kill_in_forward(t, "score", 4),
    "train": lambda t: kill_in_forward(t, "train", 5),
    "backward": lambda t: kill_in_backward(t, 5),
    "optimizer": lambda t: t.add_callback(KillAfterOptimizer(5)),
    "evaluation": lambda t: kill_in_forward(t, "rollout", 5, nth=3),
    "journal of a step": lambda t: kill_at_event(appending("steps.jsonl"), 5),
    "journal of a rollout": lambda t: kill_at_event(appending("rollouts.jsonl"), 3),
    "save, at its start": lambda t: kill_at_event(opening("checkpoint-6.staged")),
    "save, in the middle": lambda t: kill_at_event(opening("checkpoint-6.staged/lowpeak_state.json")),
    "save, before the checkpoint has its name": lambda t: kill_at_event(renaming("checkpoint-6.staged", "-6")),
    "save, after it has its name": lambda t: kill_at_event(after(renaming("checkpoint-6.staged", "-6"), "open")),
    "removal, before the old one loses its name": lambda t: kill_at_event(renaming("", ".removing")),
    "removal, in the middle": lambda t: kill_at_event(after(renaming("", ".removing"), "os.remove"), 4),
}

"""How a run is killed at an exact moment: from outside the library, by hooks that anybody's script may have.

`KILLS` names the moments. Each process kills itself with SIGKILL, which no code of its own can answer.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from fault_runs import At, Case, build
from torch import nn

Chosen = Callable[[str, tuple[Any, ...]], bool]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_forward(trainer: Any, kind: str, step: int, nth: int = 1) -> None:
    """Kill inside the nth forward of the policy that generates ("rollout") or scores, after `step` steps."""
    calls = count(1)

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found = "rollout" if kwargs.get("use_cache") else "train" if torch.is_grad_enabled() else "score"
        if found == kind and trainer.state.global_step == step and next(calls) == nth:
            kill()

    trainer.model.register_forward_pre_hook(hook, with_kwargs=True)


def in_backward(trainer: Any, step: int, act: Callable[[], None]) -> None:
    """Act, once, inside the backward pass of step `step` + 1, when the first layer's gradient is formed."""

    def hook(gradient: Any) -> None:
        if trainer.state.global_step == step:
            handle.remove()
            act()

    # No embedding: what hooks one takes its gradient by autograd's way, whose last bits differ.
    named = trainer.model.named_parameters()
    handle = next(p for name, p in named if p.requires_grad and "embed" not in name).register_hook(hook)


def kill_in_reward(trainer: Any, step: int) -> None:
    """Kill after `step` steps, when the noisy judge has drawn its random numbers."""
    reward = trainer.collector.panel.rewards[0]
    judge = reward.function

    def judged(**columns: Any) -> list[float]:
        values = judge(**columns)
        if trainer.state.global_step == step:
            kill()
        return values

    reward.function = judged


def at_event(chosen: Chosen, act: Callable[[], None], nth: int = 1) -> None:
    """Act right before the nth of Python's own events (audit hooks: opening, renaming, removing) that is chosen."""
    calls = count(1)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "shutil.rmtree") and chosen(event, args) and next(calls) == nth:
            act()

    sys.addaudithook(hook)


def kill_at_event(chosen: Chosen, nth: int = 1) -> None:
    at_event(chosen, kill, nth)


def opening(part: str) -> Chosen:
    return lambda event, args: event == "open" and part in os.fsdecode(str(args[0]))


def appending(name: str) -> Chosen:
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


def run_killed_in_training(case: Case, place: Path, step: int) -> None:
    """A run that dies in the backward pass of step `step` + 1."""
    trainer = build(case, place / "run")
    in_backward(trainer, step, kill)
    trainer.train()


# In the STANDARD run.
KILLS: dict[str, Callable[[Any], None]] = {
    "rollout": lambda t: kill_in_forward(t, "rollout", 4, nth=3),
    "reward": lambda t: kill_in_reward(t, 4),
    "score": lambda t: kill_in_forward(t, "score", 4),
    "backward": lambda t: in_backward(t, 5, kill),
    "optimizer": lambda t: t.add_callback(At("on_optimizer_step", 5, lambda model: kill())),
    "evaluation": lambda t: kill_in_forward(t, "rollout", 5, nth=3),
    "journal of a step": lambda t: kill_at_event(appending("steps.jsonl"), 5),
    "journal of a rollout": lambda t: kill_at_event(appending("rollouts.jsonl"), 3),
    "save, in the middle": lambda t: kill_at_event(opening("checkpoint-6.staged/lowpeak_state.json")),
    "save, before the checkpoint has its name": lambda t: kill_at_event(renaming("checkpoint-6.staged", "-6")),
    "save, after it has its name": lambda t: kill_at_event(after(renaming("checkpoint-6.staged", "-6"), "open")),
    "removal, before the old one loses its name": lambda t: kill_at_event(renaming("", ".removing")),
    "removal, in the middle": lambda t: kill_at_event(after(renaming("", ".removing"), "os.remove"), 4),
}

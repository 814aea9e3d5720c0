"""Arguments that the states of an optimizer and a schedule, loaded from a checkpoint, replace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowpeak.arguments import EffectReport
from lowpeak.checkpoint import other_arguments_error
from lowpeak.optim import find_compact
from lowpeak.training import CheckpointedTrainer, TrainingStates

_RATE = "learning_rate"
_FUSED = "optim's fused"

# Arguments that optimizers and schedules keep in their states. Other entries of the states change during a run.
_ARGUMENTS_OF_GROUP_KEY = {
    "weight_decay": ("weight_decay",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
} | {
    name: (f"optim's {name}",)
    for name in ("momentum", "dampening", "nesterov", "alpha", "centered", "amsgrad", "fused")
}
_SCHEDULE_ATTRIBUTES = ("factor", "patience", "threshold", "cooldown", "warmup", "min_lrs", "max_lrs")


Settings = dict[tuple[str, int], Any]


@contextmanager
def warn_of_overridden_arguments(trainer: CheckpointedTrainer, checkpoint: str, strict: bool) -> Iterator[None]:
    """Warn of arguments that the optimizer and schedule states of `checkpoint`, loaded in the block, replace; `strict`: raise."""
    requested = _settings(trainer)
    yield
    loaded = _settings(trainer)
    # The optimizer of a storage format has one kernel, and no argument of the user's sets `fused`.
    kept = set() if find_compact(trainer.optimizer) is None else {_FUSED}
    changed = [k for k in requested if k in loaded and requested[k] != loaded[k] and k[0] not in kept]
    effects = EffectReport(
        trainer.acting_args,
        f"because states in {checkpoint} replace them (a new run with model={checkpoint} begins without these states)",
    )
    changes = {_argument_name(key[0], requested[key], trainer): (loaded[key], requested[key]) for key in changed}
    if strict and changes:
        raise other_arguments_error(Path(checkpoint), changes)
    for name, (acting, given) in changes.items():
        effects.add(f"{name}={given!r}", f"{acting!r} acts")
    effects.report()


def _settings(trainer: TrainingStates) -> Settings:
    """Return the arguments in the states, by name and number of the parameter group."""
    schedule = trainer.lr_scheduler
    settings: Settings = {(_RATE, i): rate for i, rate in enumerate(getattr(schedule, "base_lrs", ()))}
    for i, group in enumerate(trainer.optimizer.param_groups):
        for key, names in _ARGUMENTS_OF_GROUP_KEY.items():
            if key in group:
                value = tuple(group[key]) if isinstance(group[key], list) else group[key]
                values = value if isinstance(value, tuple) and len(value) == len(names) else [value] * len(names)
                settings |= {(name, i): each for name, each in zip(names, values, strict=True)}
    of_schedule = {
        (f"lr_scheduler_kwargs' {key}", 0): getattr(schedule, key)
        for key in _SCHEDULE_ATTRIBUTES
        if hasattr(schedule, key)
    }
    return settings | of_schedule


def _argument_name(name: str, value: Any, trainer: CheckpointedTrainer) -> str:
    # PPO's critic has separate groups if it has a separate learning rate.
    critic_rate = getattr(trainer.acting_args, "value_learning_rate", None)
    return (
        "value_learning_rate" if name == _RATE and value == critic_rate != trainer.acting_args.learning_rate else name
    )

"""Which arguments a resumed run's optimizer and schedule do not heed: their saved states hold values of the earlier run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

_RATE = "learning_rate"

# What optimizers and schedules keep of arguments in their states. Other entries move as a run goes on.
_OF_GROUP = {"weight_decay": ("weight_decay",), "betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",)} | {
    name: (f"optim's {name}",)
    for name in ("momentum", "dampening", "nesterov", "alpha", "centered", "amsgrad", "fused")
}
_OF_SCHEDULE = ("factor", "patience", "threshold", "cooldown", "warmup", "min_lrs", "max_lrs")


Settings = dict[tuple[str, int], Any]


@contextmanager
def telling_of_held(trainer: Any, checkpoint: str) -> Iterator[None]:
    """Warn, once the block has loaded the states of `checkpoint`, of arguments that have no effect because of them."""
    asked = _settings(trainer)
    yield
    held = _settings(trainer)
    changed = [key for key in asked if key in held and asked[key] != held[key]]
    told = dict.fromkeys(
        f"{_named(key[0], asked[key], trainer)}={asked[key]!r} ({held[key]!r} acts)" for key in changed
    )
    if told:
        logger.warning(
            "The optimizer and the schedule go on as %s holds them, so arguments of this run have no effect: %s. To change them, "
            "start a new run from its weights (model=that folder).",
            checkpoint,
            ", ".join(told),
        )


def _settings(trainer: Any) -> Settings:
    """What the states have of each argument, by its name and the number of the group of parameters."""
    schedule = trainer.lr_scheduler
    found: Settings = {(_RATE, i): rate for i, rate in enumerate(getattr(schedule, "base_lrs", ()))}
    for i, group in enumerate(trainer.optimizer.param_groups):
        for key, names in _OF_GROUP.items():
            if key in group:
                value = tuple(group[key]) if isinstance(group[key], list) else group[key]
                values = value if isinstance(value, tuple) and len(value) == len(names) else [value] * len(names)
                found |= {(name, i): each for name, each in zip(names, values, strict=True)}
    own = {(f"lr_scheduler_kwargs' {key}", 0): getattr(schedule, key) for key in _OF_SCHEDULE if hasattr(schedule, key)}
    return found | own


def _named(name: str, value: Any, trainer: Any) -> str:
    """Under PPO the critic's groups have a rate of their own, where one is given."""
    critics = getattr(trainer.user_args, "value_learning_rate", None)
    return "value_learning_rate" if name == _RATE and value == critics != trainer.user_args.learning_rate else name

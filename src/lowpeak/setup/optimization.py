"""Checks of optimizer, schedule and the best model's metric, which transformers reads after a model is loaded or later."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer, get_scheduler

from lowpeak.arguments import ACT_IF, STORAGE_ARGUMENTS, RunFacts, check_values
from lowpeak.errors import ArgumentError, first_line

_NUM_STEPS = 1000  # of the schedule that is tried
# Without initial weights, which would be drawn from torch's random generator.
_LAYER = nn.Sequential(nn.utils.skip_init(nn.Linear, 1, 1))


def check_optimizer(args: Any, passed: tuple[Any, Any]) -> None:
    """Raise ArgumentError for an optimizer or a schedule that cannot be made, tried on one layer.

    `passed` are the optimizer and the schedule that the user passed, or None for each that the arguments describe.
    """
    check_values(args)
    for name in STORAGE_ARGUMENTS:
        if passed[0] is not None and getattr(args, name) not in (None, False):
            raise ArgumentError(
                f"{name}={getattr(args, name)} has no effect on an optimizer that is passed in: remove one of the two."
            )
    if passed[0] is None:
        _check_optimizer(args)
    if passed[1] is None:
        _check_schedule(args)


def _check_optimizer(args: Any) -> None:
    shown = f"optim={str(args.optim.value)!r}"
    if args.optim in ("lomo", "adalomo") or args.optim.endswith("layerwise"):
        raise ArgumentError(
            f"{shown} updates weights in each backward pass, but a step has one for each micro-batch; use another optimizer."
        )
    with _name_arguments_in_errors(args, ("optim", "optim_args", "optim_target_modules")):
        kind, keywords = made = _make_optimizer(args, args.optim_args)
        if "params" not in keywords:  # otherwise they are of layers
            kind(_LAYER.parameters(), **keywords)
    if ACT_IF["optim_args"].holds(args, RunFacts()):
        _check_optim_args(args, made, shown)


def _check_optim_args(args: Any, made: tuple[Any, Any], shown: str) -> None:
    """Raise ArgumentError for a name in optim_args that the optimizer does not read."""
    pairs = (args.optim_args or "").replace(" ", "").split(",")
    for pair in filter(None, pairs):
        others = [each for each in pairs if each != pair]
        wrong = [*others, f"{pair.partition('=')[0]}=?"]
        # Reading a name shows if it is missing, or if its value is neither a number nor a word.
        if made == _try_optimizer(args, others) == _try_optimizer(args, wrong):
            raise ArgumentError(f"optim_args has {pair}, which {shown} does not read; correct or remove it.")


def _make_optimizer(args: Any, optim_args: str | None) -> tuple[Any, Any]:
    trial = copy.copy(args)
    trial.optim_args = optim_args
    if trial.optim_target_modules is not None:
        trial.optim_target_modules = "all-linear"
    return Trainer.get_optimizer_cls_and_kwargs(trial, _LAYER)


def _try_optimizer(args: Any, pairs: list[str]) -> tuple[Any, Any] | None:
    try:
        return _make_optimizer(args, ",".join(pairs))
    except (AttributeError, TypeError, ValueError):
        return None


def _check_schedule(args: Any) -> None:
    optimizer = torch.optim.SGD(_LAYER.parameters(), lr=args.learning_rate)
    with _name_arguments_in_errors(args, ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")):
        get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(_NUM_STEPS),
            num_training_steps=_NUM_STEPS,
            scheduler_specific_kwargs=copy.deepcopy(args.lr_scheduler_kwargs),
        )


@contextmanager
def _name_arguments_in_errors(args: Any, names: tuple[str, ...]) -> Iterator[None]:
    """Raise ArgumentError with the arguments of these names, in place of an error of transformers or torch."""
    try:
        yield
    except (AttributeError, ImportError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        values = {name: getattr(args, name) for name in names}
        shown = ", ".join(f"{name}={getattr(value, 'value', value)!r}" for name, value in values.items() if value)
        raise ArgumentError(f"{shown} cannot be used: {first_line(error)}; correct or remove it.") from error


def check_best_metric(trainer: Any, prefix: str, metrics: Mapping[str, float]) -> None:
    """Raise ArgumentError if an evaluation during training has no `metric_for_best_model`, which transformers compares."""
    name = trainer.args.metric_for_best_model
    wanted = None if name is None else f"eval_{name.removeprefix('eval_')}"
    if trainer.is_in_train and prefix == "eval" and wanted is not None and wanted not in metrics:
        names = ", ".join(sorted(each.removeprefix("eval_") for each in metrics))
        raise ArgumentError(f"metric_for_best_model={name!r} is not a metric of the evaluation; set one of {names}.")

"""A trainer's attributes for users and callbacks: TRL's names, and the arguments that it was made with."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lowpeak.arguments import RunFacts, check_values, idle_arguments, own_arguments, show
from lowpeak.data import check_max_steps
from lowpeak.errors import ArgumentError
from lowpeak.trainers.configs import (
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    PPOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
)

# Arguments that transformers reads when training starts. The others have acted when the trainer is made.
_READ_BY_TRAIN = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps")
_REWARD_ATTRIBUTES = ("reward_funcs", "reward_func_names", "reward_processing_classes")
_PART_ATTRIBUTES = ("train_dataset", "rollout_func", "ref_model", "tools", *_REWARD_ATTRIBUTES)


class RunAttribute:
    """An attribute that a run is built with and that cannot be set then: a part, or an argument at its present value."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type) -> Any:
        if trainer is None:
            return self
        if self._name in vars(trainer):
            return vars(trainer)[self._name]
        args = vars(trainer).get("acting_args")
        if not hasattr(args, self._name):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        present = trainer.coefficients() if "run" in vars(trainer) else {}
        return present.get(self._name, getattr(args, self._name))

    def __set__(self, trainer: Any, value: Any) -> None:
        if "run" in vars(trainer) and hasattr(trainer, self._name):
            raise ArgumentError(
                f"{self._name} cannot be changed on a {type(trainer).__name__}, whose run was built with it: make a new trainer."
            )
        vars(trainer)[self._name] = value


class TrainerAttributes:
    """A mixin by which a trainer has its arguments and parts as attributes, and notices arguments that changed."""

    args: Any

    def watch_arguments(self, passed: Any, parts: Any) -> None:
        """Remember the values of the arguments that the user passed (None: the defaults), and of the trainer's copy."""
        self.user_args, self.acting_args = parts.user_args, parts.args
        passed = passed or parts.user_args
        names = [each.name for each in fields(passed) if each.init]
        self.watched_arguments: list[tuple[Any, dict[str, Any]]] = [
            (source, {name: getattr(source, name) for name in watched})
            for source, watched in ((passed, names), (self.args, own_arguments(self.args).union(_READ_BY_TRAIN)))
        ]

    def take_changed_arguments(self: Any) -> None:
        """Apply arguments that the user has changed; ArgumentError for one that would have no effect any more."""
        for source, before in self.watched_arguments:
            changed = {name: getattr(source, name) for name, value in before.items() if getattr(source, name) != value}
            for name in changed.keys() - set(_READ_BY_TRAIN):
                raise ArgumentError(
                    f"args was changed to {show(name, changed[name])}, which has no effect on this {type(self).__name__}, whose "
                    f"run was built with {show(name, before[name])}: make a new trainer."
                )
            for args in (self.args, self.acting_args) if changed else ():
                vars(args).update({name: getattr(source, name) for name in _READ_BY_TRAIN})
                args.given = getattr(args, "given", frozenset()) | changed.keys()
                check_values(args)
                check_max_steps(self.train_dataset, args.max_steps)
                for argument, reason in idle_arguments(args, RunFacts()).items():
                    self.parts.effects.add(argument, reason)
            before.update(changed)

    def keep_rewards(self: Any, panel: Any, reference: Any, rollout_func: Any) -> None:
        """Set TRL's attributes of an online trainer: the functions and models themselves, their tokenizers, the reference."""
        self.reward_funcs = [getattr(x, "function", None) or getattr(x, "model", x) for x in panel.rewards]
        self.reward_func_names, self.reward_weights = list(panel.names), panel.settings.weights
        self.reward_processing_classes = [getattr(x, "tokenizer", None) for x in panel.rewards]
        self.ref_model, self.rollout_func = reference and reference.model, rollout_func
        self.tools = [] if self.parts.toolset is None else self.parts.toolset.tools

    @property
    def environments(self: Any) -> list[Any] | None:
        """This rank's environments of the last rollout, in the order of its completions; None without environments."""
        return None if self.parts.toolset is None else self.parts.toolset.environments


_OFFLINE = (SFTConfig, RewardConfig, DPOConfig, KTOConfig)
for _config in (GRPOConfig, RLOOConfig, PPOConfig, OnlineDPOConfig, DistillationConfig, *_OFFLINE):
    for _name in own_arguments(_config).union(_PART_ATTRIBUTES):
        setattr(TrainerAttributes, _name, RunAttribute(_name))

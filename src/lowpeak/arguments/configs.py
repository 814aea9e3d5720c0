"""The face: GRPOConfig and its siblings, flat dataclasses over transformers' TrainingArguments.

Names are TRL's where the meaning is the same. What each argument is stands in `config/`, a file for each family.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

import torch
from transformers import TrainingArguments

from lowpeak.arguments.base import CommonArguments
from lowpeak.arguments.declare import MAPPING, argument, redeclared, require
from lowpeak.arguments.grpo import GRPOArguments
from lowpeak.arguments.names import REJECTED, check_names, drop_trl_defaults
from lowpeak.arguments.offline import RewardArguments, SFTArguments
from lowpeak.arguments.online import OnlineArguments
from lowpeak.arguments.online_dpo import OnlineDPOArguments
from lowpeak.arguments.parallelism import (
    WHOLE,
    Cut,
    is_on,
    refuse_fsdp1,
    refuse_other_parallelism,
    require_deepspeed,
    settle_deepspeed,
    settled_cut,
    take_fsdp_over,
)
from lowpeak.arguments.ppo import PPOArguments
from lowpeak.arguments.rloo import RLOOArguments
from lowpeak.arguments.rollout import SAID_BY_ARGUMENTS
from lowpeak.arguments.text import hide_secrets, read_object
from lowpeak.arguments.validation import check_finite, check_range
from lowpeak.errors import ArgumentError
from lowpeak.setup import limit_collectives_on_cpu, meet_anew

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=TrainingArguments)

_RENAMED = (
    ("gradient_checkpointing", "activation_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
)


@dataclass_transform(field_specifiers=(argument, redeclared))
def config_dataclass(config: type[Config]) -> type[Config]:
    """Make a class of arguments a dataclass; a name that it does not have is an ArgumentError with the remedy, no TypeError."""
    config = dataclass(repr=False)(config)
    made = config.__init__
    known = {f.name for f in fields(config) if f.init}
    rejected = REJECTED | getattr(config, "rejected", {})  # names that other configs may have

    @functools.wraps(made)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = drop_trl_defaults(kwargs, known)
        check_names(kwargs, known, rejected)
        self.given = frozenset(kwargs)  # transformers changes some of its own fields right after
        made(self, *args, **kwargs)

    config.__init__ = checked
    return config


def _read_mapping(args: Any, name: str) -> None:
    """Have an argument hold the mapping that it was given, or the text of; ArgumentError where it is none."""
    value = getattr(args, name)
    if isinstance(value, str):
        try:
            setattr(args, name, read_object(value))
        except ValueError as error:  # the text may hold a token
            raise ArgumentError(f"{name} {MAPPING.words} ({error}).") from None
    check_range(args, name)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Keep transformers from asking accelerate to compile: torch_compile does not act."""
    names = ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@dataclass(repr=False)
class CommonConfig(CommonArguments, TrainingArguments):
    """What every lowpeak trainer takes, made ready for transformers and accelerate."""

    saves_no_tokens: ClassVar[bool] = False  # whether a pickle is without access tokens

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.metadata.get("check") is MAPPING:
                _read_mapping(self, field.name)
        if self.bf16 is None:
            self.bf16 = not self.use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        self._default_checkpointing()
        self._settle_sharding()
        meet_anew()
        check_range(self, "ddp_timeout")  # used at once, by transformers too
        if self.use_cpu or is_on(os.environ, "ACCELERATE_USE_CPU"):
            limit_collectives_on_cpu(self.ddp_timeout, self.ddp_backend)
        check_finite(self, ("logging_steps", "eval_steps", "save_steps"))  # transformers makes them whole
        with _uncompiled():
            super().__post_init__()
        if self.fsdp_plugin_args is not None:
            refuse_fsdp1(self.fsdp_plugin_args["fsdp_version"], "fsdp_config")
        use_one_device(self)
        if self.deepspeed_plugin is not None:
            settle_deepspeed(self.deepspeed_plugin.hf_ds_config.config, self)

    @property
    def eval_batch_size(self) -> int:
        """The rows that transformers reports of an evaluation's batch."""
        return (self.per_device_eval_batch_size or self.per_device_train_batch_size) * max(1, self.n_gpu)

    @property
    def cut(self) -> Cut:
        """How tensor parallelism cuts the policy where it is loaded."""
        return settled_cut(os.environ, self.parallelism_config)

    @property
    def checkpoints_activations(self) -> bool:
        """Whether activations are recomputed, by whichever name the installed transformers has for it."""
        return bool(getattr(self, "activation_checkpointing", None) or self.gradient_checkpointing)

    def __str__(self) -> str:
        shown = hide_secrets({field.name: getattr(self, field.name) for field in fields(self)})
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    __repr__ = __str__

    def __getstate__(self) -> dict[str, Any]:
        return hide_secrets(self.__dict__, None) if self.saves_no_tokens else self.__dict__

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as trackers show them, without access tokens."""
        return hide_secrets(super().to_dict())

    def _settle_sharding(self) -> None:
        """Raise ArgumentError for what was asked of accelerate, here or in the environment, and lowpeak does not run."""
        loading: Any = self.model_init_kwargs or {}
        refuse_other_parallelism(os.environ, loading)
        deepspeed = bool(self.deepspeed) or is_on(os.environ, "ACCELERATE_USE_DEEPSPEED")
        beside = "DeepSpeed" if deepspeed else "the argument fsdp" if self.fsdp else ""
        if settled_cut(os.environ, self.parallelism_config, beside) != WHOLE:
            take_fsdp_over(os.environ)
        if deepspeed:
            require_deepspeed("a run under DeepSpeed")
        if is_on(os.environ, "ACCELERATE_USE_FSDP"):
            refuse_fsdp1(os.environ.get("FSDP_VERSION", "1"), "the environment (accelerate's config, or FSDP_VERSION)")
        given: Any = self  # transformers' own types are those of its command line
        if str(given.fsdp).lower() == "true":
            given.fsdp = True

    def _default_checkpointing(self) -> None:
        """Activation checkpointing on by default, under the name that the installed transformers has for it."""
        newer = any(field.name == "activation_checkpointing" for field in fields(TrainingArguments))
        for old, new in _RENAMED if newer else ():
            if getattr(self, new) is None:
                setattr(self, new, getattr(self, old))
            setattr(self, old, None)
        name = "activation_checkpointing" if newer else "gradient_checkpointing"
        if getattr(self, name) is None:
            setattr(self, name, True)


@dataclass(repr=False)
class OnlineConfig(OnlineArguments, CommonConfig):
    """What all online trainers take; a value that is given by another name of an argument is that argument's."""

    def __post_init__(self) -> None:
        self.said_as: dict[str, str] = {}
        for field in fields(self):
            if field.metadata.get("means"):
                self._set_by(field.name, field.metadata["means"], getattr(self, field.name))
        super().__post_init__()
        told: Any = self.generation_kwargs or {}
        for name, ours in SAID_BY_ARGUMENTS.items():
            self._set_by(f"generation_kwargs[{name!r}]", ours, told.get(name))

    def _set_by(self, name: str, ours: str, value: float | None) -> None:
        """Set an argument by another name; ArgumentError if its own name was given another value."""
        if value is None:
            return
        given: frozenset[str] = getattr(self, "given", frozenset())
        if ours in given and getattr(self, ours) != value:
            value, own = getattr(self, name, value), getattr(self, ours)
            raise ArgumentError(f"{name}={value!r} and {ours}={own!r} say the same thing; give one.")
        setattr(self, ours, value)
        self.said_as[ours] = name


@config_dataclass
class GRPOConfig(GRPOArguments, OnlineConfig):
    """Arguments of GRPO and its family (DeepSeekMath, arXiv 2402.03300; Dr. GRPO, DAPO, GSPO, CISPO)."""


@config_dataclass
class RLOOConfig(RLOOArguments, OnlineConfig):
    """Arguments of RLOO (Ahmadian et al. 2024, arXiv 2402.14740)."""


@config_dataclass
class PPOConfig(PPOArguments, OnlineConfig):
    """Arguments of PPO (arXiv 1707.06347) with a KL in the reward (arXiv 1909.08593)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_mini_batches is not None:
            check_range(self, "num_mini_batches")  # used at once
            steps = self.num_mini_batches * self.gradient_accumulation_steps
            self._set_by("num_mini_batches", "steps_per_generation", steps)
        zero = getattr(self, "deepspeed_plugin", None)
        require(
            self.value_learning_rate is None or zero is None or "optimizer" not in zero.hf_ds_config.config,
            f"value_learning_rate={self.value_learning_rate} needs an optimizer of torch's, and the DeepSpeed config has a section "
            "for its own: take the section out (optim and learning_rate say the same), or leave value_learning_rate out.",
        )


@config_dataclass
class OnlineDPOConfig(OnlineDPOArguments, OnlineConfig):
    """Arguments of Online DPO (Guo et al. 2024, arXiv 2402.04792)."""


@config_dataclass
class SFTConfig(SFTArguments, CommonConfig):
    """Arguments of supervised training."""


@config_dataclass
class RewardConfig(RewardArguments, CommonConfig):
    """Arguments of reward model training (Bradley-Terry; InstructGPT, arXiv 2203.02155)."""


def use_one_device(args: TrainingArguments) -> None:
    """Train on the first of several devices that a process sees, and say so: transformers would cut a padded batch over them."""
    if args.n_gpu > 1:
        logger.warning(
            "One process sees %d devices and trains on the first: start one for each with --accelerate_config ddp (or fsdp2), "
            "`accelerate launch` or torchrun, or set CUDA_VISIBLE_DEVICES.",
            args.n_gpu,
        )
        args._n_gpu = 1

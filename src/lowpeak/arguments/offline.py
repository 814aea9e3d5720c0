"""Supervised and reward model training: arguments, and checks of TRL's packing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from lowpeak.arguments.base import CommonArguments, RunSettings, resolve_memory, resolve_model, resolve_passes
from lowpeak.arguments.declare import (
    NOT_NEGATIVE,
    EffectCondition,
    Hardware,
    argument,
    at_least,
    data_argument,
    if_on,
    make_settings,
    model_argument,
    never,
    one_of,
    redeclared,
    require,
)
from lowpeak.arguments.rollout import RolloutArguments

logger = logging.getLogger(__name__)

SupervisedLossType = Literal["nll", "dft"]
Settings = TypeVar("Settings", bound="OfflineSettings")

# TRL's packing strategies that lowpeak refuses, with the remedy.
_TRL_STRATEGIES = {
    "bfd_split": "the second part of a split row would lack its context; split long rows beforehand, or raise max_length",
    "wrapped": "rows would be split anywhere and attend to each other; join the texts beforehand",
}


@dataclass(repr=False)
class OfflineArguments(CommonArguments):
    """Arguments that supervised and reward model training share; tokenizer arguments change a copy of it."""

    never_act: ClassVar[Mapping[str, EffectCondition]] = {
        "per_device_eval_batch_size": never(
            "evaluation runs micro-batches of micro_batch_tokens, as training does; remove it"
        )
    }

    eos_token: str | None = model_argument(None, "End-of-sequence token (None: the tokenizer's).")
    pad_token: str | None = model_argument(None, "Padding token (None: the tokenizer's).")
    chat_template_path: str | None = data_argument(
        None, "A .jinja or .j2 file with the chat template (None: the tokenizer's)."
    )
    max_length: int | None = data_argument(
        1024, "Maximum tokens of a row; longer rows are truncated at their end (None: no limit).", at_least(2, "tokens")
    )


@dataclass(repr=False)
class SFTArguments(OfflineArguments):
    """Arguments of supervised training."""

    never_act: ClassVar[Mapping[str, EffectCondition]] = {
        "eval_packing": never(
            "evaluation averages over tokens and keeps rows separate, so packing changes nothing; remove it"
        )
    }

    learning_rate: float = redeclared(CommonArguments, "learning_rate", 2e-5)
    disable_dropout: bool = redeclared(CommonArguments, "disable_dropout", False)
    dataset_text_field: str = data_argument("text", "Column of rows that are plain text.")
    completion_only_loss: bool | None = data_argument(
        None, "Compute the loss on completions only (None: if rows have a prompt)."
    )
    assistant_only_loss: bool = data_argument(False, "Compute the loss on assistant messages only.")
    loss_type: str = argument(
        "nll",
        "Loss: nll (negative log-likelihood), or dft (nll weighted by the token's probability).",
        one_of(SupervisedLossType),
    )
    packing: bool = data_argument(
        False, "Concatenate rows without padding, or raise an error (False: concatenate if the model supports it)."
    )
    packing_strategy: str = data_argument(
        "bfd",
        "With packing: only 'bfd', which truncates rows longer than max_length.",
        one_of(Literal["bfd"], "bfd-requeue", *_TRL_STRATEGIES),
        if_on("packing"),
    )
    eval_packing: bool | None = data_argument(None, "No effect: evaluation lays rows out as training does.")


@dataclass(frozen=True)
class TokenizerSettings:
    """Changes of a copy of the tokenizer: special tokens, and the path of a chat template; None for no change."""

    eos_token: str | None
    pad_token: str | None
    chat_template_path: str | None


@dataclass(frozen=True)
class OfflineSettings(RunSettings):
    """Settings of an offline run, which adds the tokenizer and the reading of rows."""

    tokenizer: TokenizerSettings
    shuffle_dataset: bool
    chat_template_kwargs: Mapping[str, Any] | None
    max_length: int | None


@dataclass(frozen=True)
class SupervisedSettings(OfflineSettings):
    """Settings of supervised training."""

    dataset_text_field: str
    completion_only_loss: bool | None
    assistant_only_loss: bool
    loss_type: SupervisedLossType


def resolve_supervised(args: Any, hardware: Hardware | None = None) -> SupervisedSettings:
    """Return the settings of supervised training; ArgumentError for packing that lowpeak does not support."""
    _check_packing(args)
    return resolve_offline(SupervisedSettings, args, hardware)


def resolve_offline(
    settings: Callable[..., Settings], args: Any, hardware: Hardware | None, **computed: Any
) -> Settings:
    """Return the settings of an offline run; `computed` are the fields of its own kind."""
    return make_settings(
        settings,
        args,
        model=resolve_model(args),
        memory=resolve_memory(args, hardware),
        passes=resolve_passes(args),
        log_all=args.log_all,
        tokenizer=make_settings(TokenizerSettings, args),
        **computed,
    )


def _check_packing(args: Any) -> None:
    """Raise ArgumentError for packing that lowpeak does not support; warn that a step counts rows, not packed sequences."""
    if not args.packing:
        return
    strategy = {"bfd-requeue": "bfd_split"}.get(args.packing_strategy, args.packing_strategy)
    require(
        strategy == "bfd",
        f"packing_strategy={strategy!r} is not supported: {_TRL_STRATEGIES.get(strategy)}; use 'bfd'.",
    )
    require(
        args.padding_free is not False,
        "packing=True contradicts padding_free=False: packed rows are concatenated without padding; remove one of the two.",
    )
    logger.warning(
        "packing=True: a step takes per_device_train_batch_size x gradient_accumulation_steps x ranks rows of the dataset, while "
        "in TRL it takes as many packed sequences of max_length tokens; raise per_device_train_batch_size to train on as many "
        "tokens per step."
    )


_NO_LOGPROBS = never("a reward model gives one score per row and no log-probs; remove it")


@dataclass(repr=False)
class RewardArguments(OfflineArguments):
    """Arguments of reward model training (Bradley-Terry; InstructGPT, arXiv 2203.02155)."""

    never_act: ClassVar[Mapping[str, EffectCondition]] = {
        "logprob_chunk_size": _NO_LOGPROBS,
        "log_entropy": _NO_LOGPROBS,
        "router_aux_loss_coef": never("transformers' classifiers have no load-balancing loss; remove it", raises=True),
    }

    learning_rate: float = redeclared(CommonArguments, "learning_rate", 1e-4)
    max_length: int | None = redeclared(
        OfflineArguments,
        "max_length",
        help="Maximum tokens of a row; pairs with a longer row are skipped (None: the model's context).",
    )
    share_prompt: bool | None = redeclared(
        RolloutArguments,
        "share_prompt",
        help="Forward the common prefix of a pair once (None: if it saves computation).",
    )
    center_rewards_coefficient: float | None = argument(
        None, "Weight of the squared sum of a pair's rewards, which keeps rewards around 0 (None: 0).", NOT_NEGATIVE
    )


@dataclass(frozen=True)
class RewardModelSettings(OfflineSettings):
    """Settings of reward model training."""

    center_rewards_coefficient: float


def resolve_reward_model(args: Any, hardware: Hardware | None = None) -> RewardModelSettings:
    """Return the settings of reward model training."""
    return resolve_offline(
        RewardModelSettings, args, hardware, center_rewards_coefficient=args.center_rewards_coefficient or 0.0
    )

"""Supervised training: arguments, and what of TRL's packing is another thing here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lowpeak.arguments.base import CommonArguments
from lowpeak.arguments.declare import (
    NOT_NEGATIVE,
    ActsWhen,
    argument,
    at_least,
    if_on,
    in_data,
    in_model,
    never,
    one_of,
    redeclared,
    require,
)
from lowpeak.arguments.rollout import RolloutArguments

logger = logging.getLogger(__name__)

SupervisedLossType = Literal["nll", "dft"]

_STRATEGIES = {  # TRL's others
    "bfd_split": "a row's end would go on without what comes before it; split long rows beforehand, or raise max_length",
    "wrapped": "rows would be split anywhere and would see one another; join the texts beforehand",
}


@dataclass(repr=False)
class OfflineArguments(CommonArguments):
    """What supervised and reward training share: changes of the tokenizer, made in a copy of it."""

    never_act: ClassVar[Mapping[str, ActsWhen]] = {
        "per_device_eval_batch_size": never(
            "evaluation runs micro-batches of micro_batch_tokens, as training does; remove it"
        )
    }

    eos_token: str | None = in_model(None, "The tokenizer's end-of-sequence token (None: its own).")
    pad_token: str | None = in_model(None, "The tokenizer's padding token (None: its own).")
    chat_template_path: str | None = in_data(None, "A .jinja or .j2 file with the chat template.")
    max_length: int | None = in_data(
        1024, "Most tokens of a row; longer ones are cut at the end (None: no limit).", at_least(2, "tokens")
    )


@dataclass(repr=False)
class SFTArguments(OfflineArguments):
    """What supervised training takes."""

    never_act: ClassVar[Mapping[str, ActsWhen]] = {
        "eval_packing": never("evaluation metrics are averaged over tokens, and rows are kept apart; remove it")
    }

    learning_rate: float = redeclared(CommonArguments, "learning_rate", 2e-5)
    dataset_text_field: str = in_data("text", "Column of plain text rows.")
    completion_only_loss: bool | None = in_data(None, "Loss on the completion alone (None: where there is a prompt).")
    assistant_only_loss: bool = in_data(False, "Loss on the assistant's messages alone.")
    loss_type: str = argument(
        "nll", "nll (negative log-likelihood), or dft (weighed by the token's probability).", one_of(SupervisedLossType)
    )
    packing: bool = in_data(
        False, "Rows one after another without padding, as they are by default; True: an error where they cannot."
    )
    packing_strategy: str = in_data(
        "bfd",
        "With packing: 'bfd', which cuts rows longer than max_length at their end.",
        one_of(Literal["bfd"], "bfd-requeue", *_STRATEGIES),
        if_on("packing"),
    )
    eval_packing: bool | None = in_data(None, "Changes nothing: evaluation lays rows as training does.")


def check_packing(args: Any) -> None:
    """Refuse what TRL's packing does to rows and lowpeak does not; warn of what is counted in another way."""
    if not args.packing:
        return
    strategy = {"bfd-requeue": "bfd_split"}.get(args.packing_strategy, args.packing_strategy)
    require(
        strategy == "bfd",
        f"packing_strategy={strategy!r} is none of lowpeak's: {_STRATEGIES.get(strategy)}; use 'bfd'.",
    )
    require(
        args.padding_free is not False,
        "packing=True with padding_free=False: packed rows stand one after another without padding; remove one of them.",
    )
    logger.warning(
        "packing=True: rows stand one after another without padding, and a step takes per_device_train_batch_size x "
        "gradient_accumulation_steps x ranks rows of the data set, where TRL takes as many packed sequences of max_length "
        "tokens; raise per_device_train_batch_size to train on as many tokens a step."
    )


_NO_LOGPROBS = never("a reward model gives one score a row and no log-probs; remove it")


@dataclass(repr=False)
class RewardArguments(OfflineArguments):
    """What reward model training takes."""

    never_act: ClassVar[Mapping[str, ActsWhen]] = {
        "logprob_chunk_size": _NO_LOGPROBS,
        "log_entropy": _NO_LOGPROBS,
        "router_aux_loss_coef": never("transformers' classifiers have no load-balancing loss; remove it", raises=True),
    }

    learning_rate: float = redeclared(CommonArguments, "learning_rate", 1e-4)
    disable_dropout: bool = redeclared(CommonArguments, "disable_dropout", True)
    max_length: int | None = redeclared(
        OfflineArguments,
        "max_length",
        help="A pair of which one row has more tokens is left out (None: the model's context).",
    )
    share_prompt: bool | None = redeclared(
        RolloutArguments, "share_prompt", help="Forward what both rows of a pair begin with once (None: where it pays)."
    )
    center_rewards_coefficient: float | None = argument(
        None, "Weight of the square of a pair's summed rewards, which keeps them around 0.", NOT_NEGATIVE
    )

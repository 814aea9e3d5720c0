"""Reward model training (Bradley-Terry; InstructGPT, arXiv 2203.02155): arguments, and what its loss is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lowpeak.arguments.base import CommonArguments
from lowpeak.arguments.declare import NOT_NEGATIVE, ActsWhen, argument, never, redeclared
from lowpeak.arguments.rollout import RolloutArguments
from lowpeak.arguments.sft import OfflineArguments

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

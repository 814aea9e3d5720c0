"""What stands of an online run before transformers' Trainer does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowpeak.algorithms.algorithm import Algorithm
from lowpeak.config.online import OnlineSettings
from lowpeak.rewards.reward import Reward
from lowpeak.training.evaluation import Success


@dataclass(frozen=True)
class OnlineParts:
    """What was `given`, `args` with defaults for what does not act, and what these resolved to.

    Beside them models and tokenizer, the rewards, and what an evaluation counts as a success.
    """

    given: Any
    args: Any
    settings: OnlineSettings
    algorithm: Algorithm
    policy: nn.Module
    reference_model: nn.Module | None
    tokenizer: Any
    rewards: Sequence[Reward]
    success: Success

"""RewardConfig: the arguments of reward model training, TRL's names where the meaning is the same."""

from __future__ import annotations

from dataclasses import dataclass

from lowpeak.training.arguments import OfflineConfig
from lowpeak.training.fields import argument, refuses_unknown


@refuses_unknown
@dataclass(repr=False)
class RewardConfig(OfflineConfig):
    """Arguments of reward model training (Bradley-Terry; InstructGPT, arXiv 2203.02155)."""

    learning_rate: float = argument(1e-4, "training", "The optimizer's learning rate.")
    disable_dropout: bool = argument(True, "model", "Set every dropout probability to 0.")
    max_length: int | None = argument(
        1024, "data", "A pair of which one row has more tokens is left out (None: the model's context)."
    )
    share_prompt: bool | None = argument(
        None, "memory", "Forward what both rows of a pair begin with once (None: where it pays)."
    )
    center_rewards_coefficient: float | None = argument(
        None, "algorithm", "Weight of the square of a pair's summed rewards, which keeps them around 0."
    )

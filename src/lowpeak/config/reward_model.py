"""What reward model training was told, as the record that its loss is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowpeak.config.inapplicable import refuse_idle


@dataclass(frozen=True)
class RewardModelSettings:
    """`center` weighs the square of a pair's summed rewards in the loss; 0 leaves it out."""

    center: float = 0.0


def resolve_reward_model(args: Any) -> RewardModelSettings:
    """The loss's settings; an argument that has nothing to act on is an ArgumentError."""
    refuse_idle(
        args,
        ("logprob_chunk_size", "log_entropy"),
        False,
        "a reward model gives one score a row and no log-probs; remove it",
    )
    refuse_idle(
        args, ("router_aux_loss_coef",), False, "transformers' classifiers have no load-balancing loss; remove it"
    )
    return RewardModelSettings(center=args.center_rewards_coefficient or 0.0)

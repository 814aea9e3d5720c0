"""RLOO (Ahmadian et al. 2024, arXiv 2402.14740): arguments and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from lowpeak.arguments.correction import CorrectedSettings, Correction, OldPolicy, resolve_correction
from lowpeak.arguments.declare import (
    Check,
    EffectCondition,
    are_finite,
    argument,
    make_settings,
    never,
    redeclared,
    require,
)
from lowpeak.arguments.online import (
    GROUP_SIZE,
    KLEstimator,
    OnlineArguments,
    OnlineSettings,
    clip_high,
)
from lowpeak.arguments.tools import TurnCreditArguments, TurnCreditKind

KL_IN_REWARD = "Weight of the KL in the reward; at 0 no reference model is loaded."


@dataclass(repr=False)
class RLOOArguments(TurnCreditArguments, OnlineArguments):
    """Arguments of RLOO."""

    never_act: ClassVar[Mapping[str, EffectCondition]] = {
        "old_policy": never(
            "RLOO's ratio of a whole completion is to the policy; the correction has the sampler's; remove it"
        )
    }

    num_generations: int = redeclared(OnlineArguments, "num_generations", 2, check=GROUP_SIZE)
    beta: float = redeclared(OnlineArguments, "beta", 0.05, help=KL_IN_REWARD)
    kl_estimator: str = redeclared(OnlineArguments, "kl_estimator", "k1")
    normalize_advantages: bool = argument(False, "Normalise advantages to mean 0 and variance 1 over the rollout.")
    reward_clip_range: tuple[float, float] | None = argument(
        None,
        "Clip rewards to (low, high).",
        Check(lambda x: x is None or (are_finite(x) and len(x) == 2 and x[0] < x[1]), "must be (low, high)"),
    )

    @property
    def ratio_level(self) -> Literal["sequence"]:
        return "sequence"


@dataclass(frozen=True)
class RLOOSettings(CorrectedSettings):
    """Settings of RLOO: KL in the reward, leave-one-out baseline, one ratio per sequence."""

    clip_low: float
    clip_high: float
    beta: float
    kl_estimator: KLEstimator
    normalize_advantages: bool
    reward_clip: tuple[float, float] | None
    drop_equal_groups: bool
    score_old: bool
    correction: Correction | None = None
    old_policy: OldPolicy = "policy"
    turn_credit: TurnCreditKind = "outcome"
    turn_discount: float = 1.0

    @property
    def needs_old(self) -> bool:
        """Whether old log-probs are scored: for several steps per rollout or the KL in the reward."""
        return self.score_old or self.beta != 0.0


def resolve_rloo(args: RLOOArguments, online: OnlineSettings) -> RLOOSettings:
    """Return RLOO's settings; ArgumentError for a correction per token."""
    correction = resolve_correction(args)
    require(
        correction is None or correction.per_sequence,
        f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r} weighs tokens, but RLOO has one ratio per "
        "completion; use sequence_mask or sequence_truncate.",
    )
    return make_settings(
        RLOOSettings,
        args,
        clip_low=args.epsilon,
        clip_high=clip_high(args),
        reward_clip=tuple(args.reward_clip_range) if args.reward_clip_range else None,
        drop_equal_groups=args.dynamic_sampling_rounds > 0,
        score_old=online.rollout.num_steps > 1,
        correction=correction,
        old_policy="policy",
    )

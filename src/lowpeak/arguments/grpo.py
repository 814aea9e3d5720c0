"""GRPO and its family (DeepSeekMath, arXiv 2402.03300; Dr. GRPO, DAPO, GSPO, CISPO): arguments and settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from lowpeak.arguments.declare import (
    NOT_NEGATIVE,
    SHARE,
    EffectCondition,
    argument,
    if_on,
    make_settings,
    one_of,
    redeclared,
    require,
)
from lowpeak.arguments.online import (
    GROUP_SIZE,
    HAS_KL,
    REUSES_ROLLOUTS,
    CorrectedSettings,
    Correction,
    KLEstimator,
    OnlineArguments,
    OnlineSettings,
    clip_high,
    resolve_correction,
)

logger = logging.getLogger(__name__)

GRPOLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
ImportanceLevel = Literal["token", "sequence"]
RewardScale = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

_CLIPS_BELOW = EffectCondition(
    lambda args, facts: args.loss_type != "cispo", "CISPO has only the bound epsilon_high; remove it"
)
_TAKES_LEVEL = EffectCondition(_CLIPS_BELOW.holds, "loss_type='cispo' is per token; remove it", raises=True)
_REUSED_OR_CISPO = EffectCondition(
    lambda args, facts: args.loss_type == "cispo" or REUSES_ROLLOUTS.holds(args, facts), REUSES_ROLLOUTS.reason
)
_LEVELS_DIFFER = EffectCondition(
    lambda args, facts: REUSES_ROLLOUTS.holds(args, facts) or _levels_differ(args), REUSES_ROLLOUTS.reason
)
_ADAPTIVE_ENTROPY = if_on("use_adaptive_entropy")


@dataclass(repr=False)
class GRPOArguments(OnlineArguments):
    """Arguments of GRPO and its family."""

    num_generations: int = redeclared(OnlineArguments, "num_generations", check=GROUP_SIZE)
    epsilon: float = redeclared(OnlineArguments, "epsilon", also=_CLIPS_BELOW)
    epsilon_high: float | None = redeclared(OnlineArguments, "epsilon_high", acts_if=(_REUSED_OR_CISPO,))
    loss_type: str = argument("dapo", f"Loss: {', '.join(get_args(GRPOLossType))}.", one_of(GRPOLossType))
    importance_sampling_level: str = argument(
        "token",
        "Importance ratio per token, or per sequence (GSPO).",
        one_of(ImportanceLevel),
        (_TAKES_LEVEL, _LEVELS_DIFFER),
    )
    delta: float | None = argument(
        None,
        "Upper bound of the ratio for negative advantages (None: no bound).",
        acts_if=(_CLIPS_BELOW, REUSES_ROLLOUTS),
    )
    scale_rewards: Annotated[str, bool] = argument(
        "group",
        "Divide advantages by the standard deviation of rewards in the: group, batch, or none.",
        one_of(RewardScale, True, False),
        EffectCondition(
            lambda args, facts: args.multi_objective_aggregation == "sum_then_normalize",
            "normalize_then_sum already normalises each reward in its group and the sum over the rollout; remove one of the two",
            raises=True,
        ),
    )
    multi_objective_aggregation: str = argument(
        "sum_then_normalize",
        "Aggregation of several rewards: sum_then_normalize or normalize_then_sum.",
        one_of(Aggregation),
        EffectCondition(lambda args, facts: facts.num_rewards != 1, "there is one reward; pass several or remove it"),
    )
    use_bias_correction_kl: bool = argument(
        True, "Multiply the KL in the loss by the importance ratio.", acts_if=HAS_KL
    )
    top_entropy_quantile: float = argument(
        1.0, "Fraction of tokens, those of highest entropy, in the policy loss.", SHARE
    )
    entropy_coef: float = argument(
        0.0, "Weight of the entropy bonus (the first weight with use_adaptive_entropy).", NOT_NEGATIVE
    )
    use_adaptive_entropy: bool = argument(False, "Adapt entropy_coef so that the entropy approaches entropy_target.")
    entropy_coef_min: float = argument(0.0, "Minimum of the adaptive entropy_coef.", NOT_NEGATIVE, _ADAPTIVE_ENTROPY)
    entropy_coef_max: float = argument(1.0, "Maximum of the adaptive entropy_coef.", acts_if=_ADAPTIVE_ENTROPY)
    entropy_coef_delta: float = argument(
        0.005, "Change of the adaptive entropy_coef per step.", NOT_NEGATIVE, _ADAPTIVE_ENTROPY
    )
    entropy_target: float = argument(
        0.2, "Target entropy in nats per token of the adaptive entropy_coef.", NOT_NEGATIVE, _ADAPTIVE_ENTROPY
    )


@dataclass(frozen=True)
class EntropyBonus:
    """Entropy bonus with an optionally adaptive coefficient.

    With a `target`, the coefficient changes by `delta` per step within [minimum, maximum]: up while the policy's entropy is
    below the target, down while it is above.
    """

    coef: float
    target: float | None = None
    delta: float = 0.0
    minimum: float = 0.0
    maximum: float = 1.0


@dataclass(frozen=True)
class GRPOSettings(CorrectedSettings):
    """Settings of GRPO and its family.

    The ratio's upper bound is 1 + `clip_high` for every loss type. CISPO has neither `clip_low` nor `delta`: both are None.
    """

    loss_type: GRPOLossType
    importance_level: ImportanceLevel
    clip_low: float | None
    clip_high: float
    delta: float | None
    scale_rewards: RewardScale
    aggregation: Aggregation
    reward_weights: tuple[float, ...]
    beta: float
    kl_estimator: KLEstimator
    bias_corrected_kl: bool
    entropy_bonus: EntropyBonus | None
    top_entropy_quantile: float
    max_completion_length: int
    drop_equal_groups: bool
    score_old: bool
    correction: Correction | None = None


def resolve_grpo(args: Any, online: OnlineSettings) -> GRPOSettings:
    """Return GRPO's settings; ArgumentError for bounds that the loss cannot have."""
    cispo = args.loss_type == "cispo"
    require(
        not cispo or args.epsilon_high is not None,
        "loss_type='cispo' needs epsilon_high: the ratio's upper bound is 1 + epsilon_high, as for every loss type "
        "(TRL's epsilon_high=5.0 for CISPO is 4.0 here).",
    )
    if args.importance_sampling_level == "sequence" and args.loss_type != "grpo":
        logger.warning(
            "importance_sampling_level='sequence' with loss_type=%r: the loss sums over tokens, so longer completions weigh more. "
            "GSPO weighs all completions equally: set loss_type='grpo'.",
            args.loss_type,
        )
    high = clip_high(args)
    require(
        args.delta is None or args.delta > 1 + high,
        f"delta={args.delta} must be above 1 + epsilon_high = {1 + high}: it bounds the ratio of negative advantages, "
        "which clipping does not.",
    )
    return make_settings(
        GRPOSettings,
        args,
        importance_level=args.importance_sampling_level,
        clip_low=None if cispo else args.epsilon,
        clip_high=high,
        scale_rewards={True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards),
        aggregation=args.multi_objective_aggregation,
        reward_weights=online.reward_weights,
        bias_corrected_kl=args.use_bias_correction_kl,
        entropy_bonus=_resolve_entropy(args),
        drop_equal_groups=args.dynamic_sampling_rounds > 0,
        score_old=online.rollout.num_steps > 1,
        correction=resolve_correction(args),
    )


def _levels_differ(args: Any) -> bool:
    """Return whether the importance level matters if all ratios are 1: if a sequence's tokens have different weights.

    Weights differ under a top-entropy mask, a correction per token, or a bias-corrected KL.
    """
    correction = resolve_correction(args)
    per_token = correction is not None and not correction.per_sequence
    return args.top_entropy_quantile < 1 or per_token or (args.beta != 0 and args.use_bias_correction_kl)


def _resolve_entropy(args: Any) -> EntropyBonus | None:
    if args.use_adaptive_entropy:
        low, high = args.entropy_coef_min, args.entropy_coef_max
        require(low <= high, f"entropy_coef_min={low} must be at most entropy_coef_max={high}.")
        require(low <= args.entropy_coef <= high, f"entropy_coef={args.entropy_coef} must be in [{low}, {high}].")
        return EntropyBonus(args.entropy_coef, args.entropy_target, args.entropy_coef_delta, low, high)
    return EntropyBonus(args.entropy_coef) if args.entropy_coef else None

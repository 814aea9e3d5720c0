"""GRPO and its family (Dr. GRPO, DAPO, GSPO, CISPO, SAPO, LUSPO, VESPO): arguments and settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from lowpeak.arguments.correction import (
    CorrectedSettings,
    Correction,
    OldPolicy,
    resolve_correction,
    resolve_old_policy,
)
from lowpeak.arguments.declare import (
    NOT_NEGATIVE,
    SHARE,
    EffectCondition,
    above_zero,
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
    KLEstimator,
    OnlineArguments,
    OnlineSettings,
    clip_high,
)
from lowpeak.arguments.tools import TurnCreditArguments, TurnCreditKind

logger = logging.getLogger(__name__)

GRPOLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
ImportanceLevel = Literal["token", "sequence"]
RewardScale = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

_SMOOTH = ("sapo", "vespo")  # losses that clip nothing
_CLIPS = EffectCondition(lambda args, facts: args.loss_type not in _SMOOTH, "SAPO and VESPO clip no ratio; remove it")
_CLIPS_BELOW = EffectCondition(
    lambda args, facts: args.loss_type != "cispo", "CISPO has only the bound epsilon_high; remove it"
)
_TAKES_LEVEL = EffectCondition(
    lambda args, facts: args.loss_type not in ("cispo", "vespo"),
    "CISPO's ratios are of tokens, and VESPO's of sequences in any case; remove it",
    raises=True,
)
_IS_SAPO = EffectCondition(
    lambda args, facts: args.loss_type == "sapo", "loss_type is not 'sapo'; remove this, or set it"
)
_IS_VESPO = EffectCondition(
    lambda args, facts: args.loss_type == "vespo", "loss_type is not 'vespo'; remove this, or set it"
)
# The sequence's ratio is also the sampler's drift, if that is corrected.
_SEQUENCE_RATIOS_DIFFER = EffectCondition(
    lambda args, facts: REUSES_ROLLOUTS.holds(args, facts) or resolve_correction(args) is not None,
    REUSES_ROLLOUTS.reason,
)
_WEIGHS_SEQUENCES = (_IS_VESPO, _SEQUENCE_RATIOS_DIFFER)
_REUSED_OR_CISPO = EffectCondition(
    lambda args, facts: args.loss_type == "cispo" or REUSES_ROLLOUTS.holds(args, facts), REUSES_ROLLOUTS.reason
)
_LEVELS_DIFFER = EffectCondition(
    lambda args, facts: REUSES_ROLLOUTS.holds(args, facts) or args.max_staleness > 0 or _levels_differ(args),
    REUSES_ROLLOUTS.reason,
)
_ADAPTIVE_ENTROPY = if_on("use_adaptive_entropy")


@dataclass(repr=False)
class GRPOArguments(TurnCreditArguments, OnlineArguments):
    """Arguments of GRPO and its family."""

    num_generations: int = redeclared(OnlineArguments, "num_generations", check=GROUP_SIZE)
    epsilon: float = redeclared(
        OnlineArguments, "epsilon", check=NOT_NEGATIVE, acts_if=(_CLIPS_BELOW, _CLIPS, REUSES_ROLLOUTS)
    )
    epsilon_high: float | None = redeclared(
        OnlineArguments,
        "epsilon_high",
        help="Clip range of the ratio above 1 (None: epsilon); with loss_type=cispo the upper bound of the ratio itself.",
        acts_if=(_CLIPS, _REUSED_OR_CISPO),
    )
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
        acts_if=(_CLIPS_BELOW, _CLIPS, REUSES_ROLLOUTS),
    )
    sapo_temperature_pos: float = argument(
        1.0, "SAPO: temperature of the gate for positive advantages.", above_zero(), (_IS_SAPO, REUSES_ROLLOUTS)
    )
    sapo_temperature_neg: float = argument(
        1.05, "SAPO: temperature of the gate for other advantages.", above_zero(), (_IS_SAPO, REUSES_ROLLOUTS)
    )
    vespo_k_pos: float = argument(
        2.0, "VESPO: power of the sequence's ratio for advantages of 0 or more.", NOT_NEGATIVE, _WEIGHS_SEQUENCES
    )
    vespo_lambda_pos: float = argument(
        3.0,
        "VESPO: exponential decay in the sequence's ratio for advantages of 0 or more.",
        NOT_NEGATIVE,
        _WEIGHS_SEQUENCES,
    )
    vespo_k_neg: float = argument(
        3.0, "VESPO: power of the sequence's ratio for negative advantages.", NOT_NEGATIVE, _WEIGHS_SEQUENCES
    )
    vespo_lambda_neg: float = argument(
        2.0,
        "VESPO: exponential decay in the sequence's ratio for negative advantages.",
        NOT_NEGATIVE,
        _WEIGHS_SEQUENCES,
    )
    off_policy_mask_threshold: float | None = argument(
        None,
        "Drop sequences with a negative advantage whose mean log-ratio of sampler to policy is above this (None: off).",
        above_zero("a number of nats per token"),
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

    @property
    def ratio_level(self) -> ImportanceLevel:
        level: ImportanceLevel = self.importance_sampling_level  # type: ignore[assignment]  # checked
        return "sequence" if self.loss_type == "vespo" else level


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
class SAPOGate:
    """Temperatures of SAPO's gate, for positive and for other advantages."""

    positive: float
    negative: float


@dataclass(frozen=True)
class VESPOWeight:
    """VESPO's weight `exp(decay) * w^power * exp(-decay * w)` of a sequence's ratio w, by the sign of its advantage.

    `correction` is the correction of the engine's drift, which is a factor of w here, not of the loss.
    """

    positive_power: float
    positive_decay: float
    negative_power: float
    negative_decay: float
    correction: Correction | None = None


@dataclass(frozen=True)
class GRPOSettings(CorrectedSettings):
    """Settings of GRPO and its family.

    The ratio's upper bound is 1 + `clip_high` for every loss type that has one. CISPO has neither `clip_low` nor `delta`: both
    are None. `sapo` and `vespo` are the settings of these two losses, which have no bounds.
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
    sapo: SAPOGate | None = None
    vespo: VESPOWeight | None = None
    off_policy_mask_threshold: float | None = None
    old_policy: OldPolicy = "policy"
    turn_credit: TurnCreditKind = "outcome"
    turn_discount: float = 1.0


def resolve_grpo(args: Any, online: OnlineSettings) -> GRPOSettings:
    """Return GRPO's settings; ArgumentError for bounds that the loss cannot have."""
    correction, old_policy = resolve_correction(args), resolve_old_policy(args)
    _check_loss_type(args, correction)
    cispo, vespo = args.loss_type == "cispo", args.loss_type == "vespo"
    high = args.epsilon_high - 1 if cispo else clip_high(args)
    require(
        args.delta is None or args.delta > 1 + high,
        f"delta={args.delta} must be above 1 + epsilon_high = {1 + high}: it bounds the ratio of negative advantages, "
        "which clipping does not.",
    )
    require(
        args.turn_credit == "outcome" or args.multi_objective_aggregation == "sum_then_normalize",
        f"turn_credit={args.turn_credit!r} needs one sum of rewards: set multi_objective_aggregation='sum_then_normalize'.",
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
        score_old=online.rollout.num_steps > 1 and old_policy == "policy",
        old_policy=old_policy,
        correction=None if vespo else correction,
        sapo=SAPOGate(args.sapo_temperature_pos, args.sapo_temperature_neg) if args.loss_type == "sapo" else None,
        vespo=_resolve_vespo(args, correction) if vespo else None,
    )


def _check_loss_type(args: GRPOArguments, correction: Correction | None) -> None:
    """Raise ArgumentError for settings that the loss type cannot have; warn of unusual ones."""
    cispo = args.loss_type == "cispo"
    require(
        not cispo or (args.epsilon_high is not None and args.epsilon_high >= 1),
        f"epsilon_high={args.epsilon_high} with loss_type='cispo' is the upper bound of the ratio itself: set it to 1 or more; "
        "ScaleRL (arXiv 2510.13786) has 5.0.",
    )
    require(
        args.loss_type != "vespo" or correction is None or not correction.per_sequence,
        f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r} does not go with loss_type='vespo', which weighs "
        "whole sequences itself: set it to 'token_truncate' or 'token_mask'.",
    )
    if args.loss_type == "luspo" and args.importance_sampling_level != "sequence":
        logger.warning(
            "loss_type='luspo' with ratios of tokens: set importance_sampling_level='sequence', as the paper does."
        )
    if args.importance_sampling_level == "sequence" and args.loss_type in ("bnpo", "dr_grpo", "dapo"):
        logger.warning(
            "importance_sampling_level='sequence' with loss_type=%r: the loss sums over tokens, so longer completions weigh more. "
            "GSPO weighs all completions equally: set loss_type='grpo'.",
            args.loss_type,
        )


def _resolve_vespo(args: GRPOArguments, correction: Correction | None) -> VESPOWeight:
    return VESPOWeight(args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg, correction)


def _levels_differ(args: GRPOArguments) -> bool:
    """Return whether the importance level matters if all ratios are 1: if a sequence's tokens have different weights.

    Weights differ under a top-entropy mask, a correction per token, or a bias-corrected KL.
    """
    correction = resolve_correction(args)
    per_token = correction is not None and not correction.per_sequence
    return args.top_entropy_quantile < 1 or per_token or (args.beta != 0 and args.use_bias_correction_kl)


def _resolve_entropy(args: GRPOArguments) -> EntropyBonus | None:
    if args.use_adaptive_entropy:
        low, high = args.entropy_coef_min, args.entropy_coef_max
        require(low <= high, f"entropy_coef_min={low} must be at most entropy_coef_max={high}.")
        require(low <= args.entropy_coef <= high, f"entropy_coef={args.entropy_coef} must be in [{low}, {high}].")
        return EntropyBonus(args.entropy_coef, args.entropy_target, args.entropy_coef_delta, low, high)
    return EntropyBonus(args.entropy_coef) if args.entropy_coef else None

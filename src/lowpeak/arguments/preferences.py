"""DPO and KTO: arguments and settings of training on preferences beside a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from lowpeak.arguments.base import CommonArguments
from lowpeak.arguments.declare import (
    FINITE,
    NOT_NEGATIVE,
    Check,
    EffectCondition,
    Hardware,
    above_zero,
    are_finite,
    argument,
    never,
    one_of,
    redeclared,
    require,
    within,
)
from lowpeak.arguments.offline import OfflineArguments, OfflineSettings, resolve_offline
from lowpeak.arguments.online import OnlineArguments, ReferenceSync, check_reference_sync
from lowpeak.arguments.rollout import RolloutArguments

DPOLossType = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "sigmoid_norm",
    "robust",
    "exo_pair",
    "bco_pair",
    "nca_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
]
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
KTOLossType = Literal["kto", "apo_zero_unpaired"]
_SORTED = ("aot", "aot_unpaired")  # TRL's losses that compare ranks within a device's batch
_SMOOTHED = ("robust", "exo_pair")
_OF_LOG_RATIOS = ("bco_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down")  # derived for the reverse KL


def _loss_types(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _uses(*names: str) -> EffectCondition:
    """Return the condition of an argument that only these loss types read."""
    shown = " or ".join(names)
    return EffectCondition(
        lambda args, facts: not set(names).isdisjoint(_loss_types(args.loss_type)),
        f"loss_type has no {shown}; add it or remove this",
    )


@dataclass(repr=False)
class PreferenceArguments(OfflineArguments):
    """Arguments that DPO and KTO share."""

    never_act: ClassVar[Mapping[str, EffectCondition]] = {
        "precompute_ref_batch_size": never("the reference runs in micro-batches of micro_batch_tokens; remove it")
    }
    rejected: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("max_prompt_length", "max_completion_length"), "max_length bounds a prompt with its completion"
        ),
        "reference_free": "the losses compare with a reference; remove it",
    }

    learning_rate: float = redeclared(CommonArguments, "learning_rate", 1e-6)
    max_length: int | None = redeclared(
        OfflineArguments,
        "max_length",
        help="Maximum tokens of a prompt with a completion; longer ones are truncated at their end, and rows whose prompt fills it "
        "are skipped (None: the model's context).",
    )
    share_prompt: bool | None = redeclared(RolloutArguments, "share_prompt")
    offload_frozen_models: bool = redeclared(RolloutArguments, "offload_frozen_models")
    beta: float = argument(
        0.1, "Strength of the KL to the reference (IPO's tau).", Check(lambda x: x > 0, "must be above 0")
    )
    precompute_ref_log_probs: bool = argument(
        False, "Score the data by the reference before the first step, and then free its memory."
    )
    precompute_ref_batch_size: int | None = argument(None, "No effect.")
    sync_ref_model: bool = redeclared(OnlineArguments, "sync_ref_model")
    ref_model_mixup_alpha: float = redeclared(OnlineArguments, "ref_model_mixup_alpha")
    ref_model_sync_steps: int = redeclared(OnlineArguments, "ref_model_sync_steps")


@dataclass(repr=False)
class DPOArguments(PreferenceArguments):
    """Arguments of DPO."""

    rejected: ClassVar[Mapping[str, str]] = {
        **PreferenceArguments.rejected,
        "rpo_alpha": 'set loss_type=["sigmoid", "sft"] and loss_weights=[1, rpo_alpha]',
    }

    loss_type: Annotated[list[str], str] = argument(
        ["sigmoid"],
        f"Losses of a pair, which are added: {', '.join(get_args(DPOLossType))}.",
        Check(
            lambda x: bool(_loss_types(x)) and set(_loss_types(x)) <= {*get_args(DPOLossType), *_SORTED},
            f"must be one or several of {', '.join(get_args(DPOLossType))}",
        ),
    )
    loss_weights: list[float] | None = argument(
        None,
        "Weights of the losses (None: all 1).",
        Check(lambda x: x is None or are_finite(x), "must be a list of finite numbers"),
    )
    ld_alpha: float | None = argument(
        None, "Weight of tokens beyond the length of the pair's shorter completion (None: 1).", within(0, 1)
    )
    f_divergence_type: str = argument(
        "reverse_kl",
        f"Divergence from the reference: {', '.join(get_args(FDivergence))}. Others than reverse_kl do not go with "
        f"{', '.join(_OF_LOG_RATIOS)}.",
        one_of(FDivergence),
    )
    f_alpha_divergence_coef: float = argument(
        0.5,
        "Alpha of alpha_divergence; at 1 it is the reverse KL.",
        FINITE,
        EffectCondition(
            lambda args, facts: args.f_divergence_type == "alpha_divergence",
            "f_divergence_type is not 'alpha_divergence'; set it or remove this",
        ),
    )
    label_smoothing: float = argument(
        0.0, "Share of labels that are wrong, for robust and exo_pair.", within(0, 1), _uses(*_SMOOTHED)
    )
    discopop_tau: float = argument(0.05, "Temperature of discopop.", above_zero(), _uses("discopop"))


@dataclass(repr=False)
class KTOArguments(PreferenceArguments):
    """Arguments of KTO."""

    loss_type: str = argument(
        "kto", "Loss of a completion: kto, or apo_zero_unpaired, which estimates no KL.", one_of(KTOLossType)
    )
    desirable_weight: float = argument(1.0, "Weight of desirable completions.", NOT_NEGATIVE)
    undesirable_weight: float = argument(1.0, "Weight of undesirable completions.", NOT_NEGATIVE)


@dataclass(frozen=True)
class DPOSettings:
    """Settings of DPO; `losses` are pairs of a loss type and its weight, `ld_alpha` 1 weighs all tokens alike.

    `scores_in_steps`: the reference scores each step; False if it scored the data before.
    """

    losses: tuple[tuple[DPOLossType, float], ...] = (("sigmoid", 1.0),)
    beta: float = 0.1
    ld_alpha: float = 1.0
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    f_divergence: FDivergence = "reverse_kl"
    f_alpha: float = 0.5
    scores_in_steps: bool = True

    @property
    def trains_on_chosen(self) -> bool:
        """Whether a loss is the mean over the step's chosen tokens."""
        return any(name == "sft" for name, _ in self.losses)


@dataclass(frozen=True)
class KTOSettings:
    """Settings of KTO; `scores_in_steps` as of DPO."""

    loss_type: KTOLossType = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    scores_in_steps: bool = True

    @property
    def estimates_kl(self) -> bool:
        """Whether z0 is estimated from mismatched pairs of prompts and completions."""
        return self.loss_type == "kto"


@dataclass(frozen=True)
class PreferenceSettings(OfflineSettings):
    """Settings of a run beside a reference; `objective` are those of its algorithm."""

    reference_sync: ReferenceSync | None
    precompute_ref_log_probs: bool
    objective: Any


def resolve_dpo(args: Any, hardware: Hardware | None = None) -> PreferenceSettings:
    """Return the settings of DPO; ArgumentError for losses that lowpeak does not have, or that lack an argument."""
    types = _loss_types(args.loss_type)
    require(
        set(types).isdisjoint(_SORTED),
        f"loss_type={args.loss_type!r} is not supported: {' and '.join(_SORTED)} sort the log-ratios of a device's batch, so "
        "micro-batches and ranks would change the result; use another loss.",
    )
    weights = [1.0] * len(types) if args.loss_weights is None else args.loss_weights
    require(
        len(weights) == len(types),
        f"loss_weights has {len(weights)} values for {len(types)} losses; set one value per loss.",
    )
    require(any(weights), f"loss_weights={args.loss_weights} would train nothing; set a weight other than 0.")
    smoothing = args.label_smoothing
    require(
        "robust" not in types or smoothing < 0.5,
        f"label_smoothing={smoothing} must be below 0.5 with loss_type='robust'.",
    )
    require(
        "exo_pair" not in types or 0 < smoothing < 1,
        f"label_smoothing={smoothing} must be between 0 and 1 with loss_type='exo_pair', such as 0.001.",
    )
    excluded = sorted(set(types) & set(_OF_LOG_RATIOS))
    require(
        args.f_divergence_type == "reverse_kl" or not excluded,
        f"f_divergence_type={args.f_divergence_type!r} does not go with loss_type={' and '.join(map(repr, excluded))}, derived "
        "for the reverse KL; remove one of the two.",
    )
    objective = DPOSettings(
        losses=tuple(zip(types, map(float, weights), strict=True)),
        beta=args.beta,
        ld_alpha=1.0 if args.ld_alpha is None else args.ld_alpha,
        label_smoothing=smoothing,
        discopop_tau=args.discopop_tau,
        f_divergence=args.f_divergence_type,
        f_alpha=args.f_alpha_divergence_coef,
        scores_in_steps=not args.precompute_ref_log_probs,
    )
    return _resolve(args, objective, hardware)


def resolve_kto(args: Any, hardware: Hardware | None = None) -> PreferenceSettings:
    """Return the settings of KTO; ArgumentError for steps of one row."""
    steps = args.per_device_train_batch_size * args.gradient_accumulation_steps
    require(
        args.loss_type != "kto" or steps * (hardware or args.hardware).num_processes > 1,
        f"per_device_train_batch_size={steps} gives steps of one row, but z0 needs a completion of another row: raise it or "
        "gradient_accumulation_steps, or set loss_type='apo_zero_unpaired'.",
    )
    require(
        args.desirable_weight > 0 or args.undesirable_weight > 0,
        "desirable_weight and undesirable_weight are 0, which would train nothing; set one above 0.",
    )
    objective = KTOSettings(
        args.loss_type, args.beta, args.desirable_weight, args.undesirable_weight, not args.precompute_ref_log_probs
    )
    require(
        objective.scores_in_steps or not objective.estimates_kl,
        "precompute_ref_log_probs=True does not go with loss_type='kto': each step pairs other prompts and completions, which "
        "the reference scores then. Remove it, or set loss_type='apo_zero_unpaired'.",
    )
    return _resolve(args, objective, hardware)


def _resolve(args: Any, objective: DPOSettings | KTOSettings, hardware: Hardware | None) -> PreferenceSettings:
    require(
        not (args.precompute_ref_log_probs and args.sync_ref_model),
        "precompute_ref_log_probs=True frees the reference, which sync_ref_model=True would move: remove one of the two.",
    )
    sync = ReferenceSync(args.ref_model_mixup_alpha, args.ref_model_sync_steps) if args.sync_ref_model else None
    check_reference_sync(sync, args, (hardware or args.hardware).num_processes, "sync_ref_model=True")
    return resolve_offline(PreferenceSettings, args, hardware, reference_sync=sync, objective=objective)

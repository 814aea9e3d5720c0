"""Online DPO (Guo et al. 2024, arXiv 2402.04792): arguments and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from lowpeak.arguments.base import CommonArguments
from lowpeak.arguments.declare import (
    Check,
    EffectCondition,
    are_finite,
    argument,
    make_settings,
    never,
    one_of,
    redeclared,
    require,
)
from lowpeak.arguments.online import GROUP_SIZE, OnlineArguments, OnlineSettings
from lowpeak.arguments.ppo import PPOArguments

PairLossType = Literal["sigmoid", "ipo"]

REJECTED: dict[str, str] = {
    "max_length": "prompts are never cut: max_completion_length bounds completions, and overlong_prompts='drop' skips "
    "prompts that do not fit",
    "judge": "pass the judge to the trainer, as judge=",
    "gpu_memory_utilization": "use vllm_gpu_memory_utilization",
}


def _betas(beta: Any) -> tuple[Any, ...]:
    return tuple(beta) if isinstance(beta, list | tuple) else (beta,)


def _are_positive(beta: Any) -> bool:
    betas = _betas(beta)
    return are_finite(betas) and min(betas, default=0) > 0


_NO_RATIO = never("Online DPO compares the completions of a pair and clips no ratio; remove it")
_NO_CORRECTION = never("policy and reference score a pair, so the sampling probabilities do not matter; remove it")


@dataclass(repr=False)
class OnlineDPOArguments(OnlineArguments):
    """Arguments of Online DPO.

    per_device_train_batch_size counts completions, as for all trainers; in TRL's Online DPO it counts prompts.
    """

    rejected: ClassVar[Mapping[str, str]] = REJECTED
    never_act: ClassVar[Mapping[str, EffectCondition]] = {
        "epsilon": _NO_RATIO,
        "epsilon_high": _NO_RATIO,
        "old_policy": _NO_RATIO,
        "kl_estimator": never("the loss uses log-ratios of pairs and no KL estimate; remove it"),
        "vllm_importance_sampling_correction": _NO_CORRECTION,
    }

    learning_rate: float = redeclared(CommonArguments, "learning_rate", 5e-7)
    num_generations: int = redeclared(
        OnlineArguments,
        "num_generations",
        2,
        check=GROUP_SIZE,
        help="Completions per prompt; the best and the worst form a pair.",
    )
    max_completion_length: int = redeclared(OnlineArguments, "max_completion_length", 64)
    beta: Annotated[float, list[float]] = argument(
        0.1,
        "Strength of the KL to the reference (IPO's tau); a list has one value per epoch, and the last one stays.",
        Check(_are_positive, "must be a number above 0, or a list of them: at 0 the loss has no preference"),
    )
    loss_type: str = argument("sigmoid", "Loss of a pair: sigmoid (DPO) or ipo.", one_of(PairLossType))
    missing_eos_penalty: float | None = redeclared(PPOArguments, "missing_eos_penalty")
    reward_model_path: str | None = redeclared(PPOArguments, "reward_model_path")
    vllm_gpu_memory_utilization: float = redeclared(OnlineArguments, "vllm_gpu_memory_utilization", 0.55)
    vllm_importance_sampling_correction: bool = redeclared(
        OnlineArguments,
        "vllm_importance_sampling_correction",
        False,
        help="Always False: policy and reference score a pair, so sampling probabilities do not matter.",
    )

    @property
    def ratio_level(self) -> None:
        """Pairs have no ratios."""


@dataclass(frozen=True)
class OnlineDPOSettings:
    """Settings of Online DPO; `betas` has one value per epoch, and the last one stays.

    The reward of a truncated completion is lowered by `missing_eos_penalty`; with `mask_truncated` it is in no pair.
    """

    loss_type: PairLossType
    betas: tuple[float, ...]
    missing_eos_penalty: float
    mask_truncated: bool


def resolve_online_dpo(args: Any, online: OnlineSettings) -> OnlineDPOSettings:
    """Return Online DPO's settings; ArgumentError for more betas than epochs."""
    betas = _betas(args.beta)
    require(
        args.max_steps > 0 or len(betas) <= max(1, math.ceil(args.num_train_epochs)),
        f"beta has {len(betas)} values but num_train_epochs={args.num_train_epochs}; set at most one value per epoch.",
    )
    return make_settings(
        OnlineDPOSettings,
        args,
        betas=tuple(float(beta) for beta in betas),
        missing_eos_penalty=float(args.missing_eos_penalty or 0.0),
        mask_truncated=online.mask_truncated,
    )


def check_betas(args: Any, steps_per_epoch: int | None) -> None:
    """Raise ArgumentError for betas of epochs that `max_steps` does not reach; `steps_per_epoch` None means no end."""
    if args.max_steps <= 0 or steps_per_epoch is None:
        return
    betas, epochs = _betas(args.beta), -(-args.max_steps // steps_per_epoch)
    require(
        len(betas) <= epochs,
        f"beta has {len(betas)} values but max_steps={args.max_steps} ends in epoch {epochs}, of {steps_per_epoch} steps; "
        "set at most one value per epoch.",
    )

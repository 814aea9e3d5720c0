"""Online DPO (Guo et al. 2024, arXiv 2402.04792): arguments, and what its loss is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lowpeak.arguments.base import CommonArguments
from lowpeak.arguments.declare import ActsWhen, Check, are_finite, argument, fill, never, one_of, redeclared, require
from lowpeak.arguments.online import GROUPS, OnlineArguments, OnlineSettings
from lowpeak.arguments.ppo import PPOArguments

PairLossType = Literal["sigmoid", "ipo"]

REJECTED: dict[str, str] = {
    "max_length": "prompts are never cut: max_completion_length bounds completions, and overlong_prompts='drop' leaves out "
    "prompts that do not fit",
    "reward_model_path": "pass the path to the trainer, as reward_funcs",
    "judge": "pass the judge to the trainer, as judge=",
    "gpu_memory_utilization": "its name is vllm_gpu_memory_utilization",
}


def _betas(beta: Any) -> tuple[Any, ...]:
    return tuple(beta) if isinstance(beta, list | tuple) else (beta,)


def _are_positive(beta: Any) -> bool:
    betas = _betas(beta)
    return are_finite(betas) and min(betas, default=0) > 0


_NO_RATIO = never("Online DPO compares the two of a pair and clips no ratio; remove it")
_NO_CORRECTION = never("a pair is compared by what policy and reference say of it, whoever sampled it; remove it")


@dataclass(repr=False)
class OnlineDPOArguments(OnlineArguments):
    """What Online DPO takes.

    Sizes count completions as everywhere here, where TRL's per_device_train_batch_size counts prompts.
    """

    rejected: ClassVar[Mapping[str, str]] = REJECTED
    never_act: ClassVar[Mapping[str, ActsWhen]] = {
        "epsilon": _NO_RATIO,
        "epsilon_high": _NO_RATIO,
        "kl_estimator": never("the loss is of a pair's log-ratios, which need no estimate of a KL; remove it"),
        "vllm_importance_sampling_correction": _NO_CORRECTION,
    }

    learning_rate: float = redeclared(CommonArguments, "learning_rate", 5e-7)
    disable_dropout: bool = redeclared(CommonArguments, "disable_dropout", True)
    num_generations: int = redeclared(
        OnlineArguments,
        "num_generations",
        2,
        check=GROUPS,
        help="Completions of each prompt (G): the best and the worst are a pair.",
    )
    max_completion_length: int = redeclared(OnlineArguments, "max_completion_length", 64)
    beta: float | list[float] = argument(  # type: ignore[assignment]
        0.1,
        "Pull towards the reference (IPO's tau); a list has one for each epoch, and the last one stays.",
        Check(_are_positive, "must be a number above 0, or a list of such: at 0 no pair is preferred to another"),
    )
    loss_type: str = argument("sigmoid", "The loss of a pair: sigmoid (DPO's) or ipo.", one_of(PairLossType))
    missing_eos_penalty: float | None = redeclared(PPOArguments, "missing_eos_penalty")
    vllm_gpu_memory_utilization: float = redeclared(OnlineArguments, "vllm_gpu_memory_utilization", 0.55)
    vllm_importance_sampling_correction: bool = redeclared(
        OnlineArguments,
        "vllm_importance_sampling_correction",
        False,
        help="Always False: a pair is compared by policy and reference, whoever sampled it.",
    )


@dataclass(frozen=True)
class OnlineDPOSettings:
    """Online DPO: `betas` has one for each epoch, of which the last one stays.

    A completion that did not end by itself loses `missing_eos_penalty`, or is in no pair at all (`mask_truncated`).
    """

    loss_type: PairLossType
    betas: tuple[float, ...]
    missing_eos_penalty: float
    mask_truncated: bool


def resolve_online_dpo(args: Any, online: OnlineSettings) -> OnlineDPOSettings:
    """Return Online DPO's settings; ArgumentError for betas of epochs that the run does not have."""
    betas = _betas(args.beta)
    require(
        args.max_steps > 0 or len(betas) <= max(1, math.ceil(args.num_train_epochs)),
        f"beta has {len(betas)} values and num_train_epochs={args.num_train_epochs} is over before the last ones act; give "
        "at most one for each epoch.",
    )
    return fill(
        OnlineDPOSettings,
        args,
        betas=tuple(float(beta) for beta in betas),
        missing_eos_penalty=float(args.missing_eos_penalty or 0.0),
        mask_truncated=online.mask_truncated,
    )


def check_betas(args: Any, steps_per_epoch: int | None) -> None:
    """Raise ArgumentError for betas of epochs that `max_steps` does not reach; None where epochs have no end."""
    if args.max_steps <= 0 or steps_per_epoch is None:
        return
    betas, epochs = _betas(args.beta), -(-args.max_steps // steps_per_epoch)
    require(
        len(betas) <= epochs,
        f"beta has {len(betas)} values and max_steps={args.max_steps} is over in epoch {epochs}, of {steps_per_epoch} steps; "
        "give at most one for each epoch.",
    )

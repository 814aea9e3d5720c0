"""What Online DPO can be told: one frozen record, and how flat arguments become it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from lowpeak.config.inapplicable import refuse_idle, require
from lowpeak.config.ranges import Range, one_of
from lowpeak.config.resolve import OnlineSettings, require_groups
from lowpeak.config.resolve_vllm import CORRECTION

PairLossType = Literal["sigmoid", "ipo"]


@dataclass(frozen=True)
class OnlineDPOSettings:
    """Online DPO: `betas` has one for each epoch, of which the last one stays.

    A completion that did not end by itself loses `missing_eos_penalty`, or is in no pair at all (`mask_truncated`).
    """

    loss_type: PairLossType
    betas: tuple[float, ...]
    missing_eos_penalty: float
    mask_truncated: bool


def _betas(beta: Any) -> tuple[Any, ...]:
    return tuple(beta) if isinstance(beta, list | tuple) else (beta,)


def _are_positive(beta: Any) -> bool:
    betas = _betas(beta)
    numbers = [each for each in betas if isinstance(each, int | float) and not isinstance(each, bool)]
    return 0 < len(numbers) == len(betas) and all(0 < each < math.inf for each in numbers)


RANGES: dict[str, Range] = {
    "beta": (_are_positive, "must be a number above 0, or a list of such: at 0 no pair is preferred to another"),
    "loss_type": one_of(PairLossType),
    "missing_eos_penalty": (lambda x: x is None or 0 < x < math.inf, "must be a number above 0, or None"),
}

REJECTED: dict[str, str] = {
    "max_length": "prompts are never cut: max_completion_length bounds completions, and overlong_prompts='drop' leaves out "
    "prompts that do not fit",
    "reward_model_path": "pass the path to the trainer, as reward_funcs",
    "judge": "pass the judge to the trainer, as judge=",
    "gpu_memory_utilization": "its name is vllm_gpu_memory_utilization",
}

_IDLE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("epsilon", "epsilon_high"), "Online DPO compares the two of a pair and clips no ratio; remove it"),
    (("kl_estimator",), "the loss is of a pair's log-ratios, which need no estimate of a KL; remove it"),
    (CORRECTION, "a pair is compared by what policy and reference say of it, whoever sampled it; remove it"),
)


def resolve_online_dpo(args: Any, online: OnlineSettings) -> OnlineDPOSettings:
    """Online DPO's settings; an argument that the run leaves idle is an ArgumentError."""
    require_groups(args)
    for names, why in _IDLE:
        refuse_idle(args, names, False, why)
    refuse_idle(
        args,
        ("missing_eos_penalty",),
        not online.mask_truncated,
        "mask_truncated_completions leaves completions that did not end by themselves out of every pair; remove one of the two",
    )
    betas = _betas(args.beta)
    epochs = math.ceil(args.num_train_epochs)
    require(
        args.max_steps > 0 or len(betas) <= max(1, epochs),
        f"beta has {len(betas)} values and num_train_epochs={args.num_train_epochs} is over before the last ones act; give "
        "at most one for each epoch.",
    )
    return OnlineDPOSettings(
        loss_type=args.loss_type,
        betas=tuple(float(beta) for beta in betas),
        missing_eos_penalty=float(args.missing_eos_penalty or 0.0),
        mask_truncated=online.mask_truncated,
    )


def check_betas(args: Any, steps_per_epoch: int | None) -> None:
    """ArgumentError for betas of epochs that `max_steps` does not reach; None where epochs have no end."""
    if args.max_steps <= 0 or steps_per_epoch is None:
        return
    betas, epochs = _betas(args.beta), -(-args.max_steps // steps_per_epoch)
    require(
        len(betas) <= epochs,
        f"beta has {len(betas)} values and max_steps={args.max_steps} is over in epoch {epochs}, of {steps_per_epoch} steps; "
        "give at most one for each epoch.",
    )

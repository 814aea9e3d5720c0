"""Distillation from a teacher on the policy's own completions (GKD, arXiv 2306.13649): arguments and settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lowpeak.arguments.declare import MAPPING, EffectCondition, argument, model_argument, never, redeclared, within
from lowpeak.arguments.online import OnlineArguments
from lowpeak.arguments.storage import rename_dtype

logger = logging.getLogger(__name__)

_NO_REFERENCE = never("the teacher is not a reference, and no KL to one is taken; remove it")
_NO_RATIO = never("the loss is the divergence from the teacher and has no ratio; remove it")


@dataclass(repr=False)
class DistillationArguments(OnlineArguments):
    """Arguments of distillation. `beta` chooses the divergence; that of the other algorithms is a KL's weight."""

    needs_rewards: ClassVar[bool] = False
    rejected: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("seq_kd", "loss_type"), "the loss is the divergence that beta chooses; remove it"),
        "max_length": "prompts are never cut: max_completion_length bounds completions",
        "disable_dropout_teacher": "a teacher is always in eval mode; remove it",
    }
    never_act: ClassVar[Mapping[str, EffectCondition]] = {
        **dict.fromkeys(
            ("kl_estimator", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), _NO_REFERENCE
        ),
        **dict.fromkeys(("epsilon", "epsilon_high", "vllm_importance_sampling_correction"), _NO_RATIO),
        "dynamic_sampling_rounds": never("the loss does not read rewards; remove it"),
    }

    num_generations: int = redeclared(OnlineArguments, "num_generations", 1)
    beta: float = argument(
        1.0,
        "Divergence of policy p from teacher q: 0 is forward KL(q|p), 1 reverse KL(p|q), between them the generalised JSD.",
        within(0, 1),
    )
    vllm_importance_sampling_correction: bool = redeclared(
        OnlineArguments, "vllm_importance_sampling_correction", False, help="Always False: the loss has no ratio."
    )
    teacher_model_name_or_path: str | None = model_argument(None, "Name or path of the teacher.")
    teacher_model_revision: str | None = model_argument(None, "Revision of the teacher on the hub.")
    teacher_model_init_kwargs: dict[str, Any] | str | None = model_argument(
        None, "Arguments of from_pretrained for the teacher (JSON), such as a quantization_config.", MAPPING
    )


@dataclass(frozen=True)
class DistillationSettings:
    """Settings of distillation: the kind of divergence (see `naive_divergence`)."""

    beta: float


@dataclass(frozen=True)
class TeacherSettings:
    """A teacher that is named in the arguments, and the arguments of `from_pretrained` for one that is given by name."""

    name: str | None
    loading: Mapping[str, Any] = field(repr=False)  # may have an access token


def resolve_distillation(args: DistillationArguments) -> DistillationSettings:
    """Return the settings; log a warning of a JSD whose gradient is far smaller than a KL's, which vanishes at both ends."""
    if any(low < args.beta < high for low, high in ((0.0, 0.1), (0.9, 1.0))):
        logger.warning(
            "beta=%g weighs the sides of the JSD so unequally that its gradient is far smaller than those of the KLs at 0 and 1: "
            "gradient clipping then acts seldom.",
            args.beta,
        )
    return DistillationSettings(args.beta)


def resolve_teacher(args: DistillationArguments) -> TeacherSettings:
    """Return how the teacher is loaded."""
    loading: Any = args.teacher_model_init_kwargs or {}
    revision = {} if args.teacher_model_revision is None else {"revision": args.teacher_model_revision}
    return TeacherSettings(args.teacher_model_name_or_path, {**rename_dtype(loading), **revision})

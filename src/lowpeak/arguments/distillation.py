"""Distillation from a teacher on the policy's own completions (GKD, arXiv 2306.13649): arguments and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowpeak.arguments.declare import MAPPING, EffectCondition, argument, model_argument, never, redeclared, within
from lowpeak.arguments.online import OnlineArguments

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

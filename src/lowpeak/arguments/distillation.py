"""Distillation from a teacher on the policy's own completions (GKD, arXiv 2306.13649): arguments and settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from lowpeak.arguments.correction import resolve_correction, resolve_old_policy
from lowpeak.arguments.declare import (
    MAPPING,
    Check,
    EffectCondition,
    argument,
    at_least,
    model_argument,
    never,
    one_of,
    redeclared,
    require,
    within,
)
from lowpeak.arguments.grpo import GRPOSettings
from lowpeak.arguments.online import OnlineArguments, OnlineSettings, ReferenceSync, clip_high
from lowpeak.arguments.storage import rename_dtype

logger = logging.getLogger(__name__)

TeacherKind = Literal["live", "ema", "base"]
DistillationMode = Literal["full_logits", "sampled_token"]

_NO_REFERENCE = never("the teacher is not a reference, and no KL to one is taken; remove it")
_HAS_RATIO = EffectCondition(
    lambda args, facts: args.distillation_weight < 1 or args.distillation_mode == "sampled_token",
    "the loss is the divergence from the teacher and has no ratio; remove it, or set distillation_weight below 1 or "
    "distillation_mode='sampled_token'",
)
_AVERAGES = EffectCondition(
    lambda args, facts: args.teacher_model_kind == "ema", "the teacher is not an average; set teacher_model_kind='ema'"
)
# An evaluation generates, too; one that a user calls reads the values.
_GENERATES = EffectCondition(
    lambda args, facts: args.lmbda > 0 or args.eval_strategy != "no" or args.eval_on_start,
    "lmbda=0 takes all completions from the dataset, and nothing is generated; remove it, or raise lmbda",
    keeps_value=True,
)
_TEMPLATE = "{prompt}\n\n{privileged_context}"


def _is_template(value: Any) -> bool:
    try:
        combined = value.format(prompt="\0", privileged_context="\1")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False
    return "\0" in combined and "\1" in combined


@dataclass(repr=False)
class DistillationArguments(OnlineArguments):
    """Arguments of distillation. `beta` chooses the divergence; that of the other algorithms is a KL's weight."""

    needs_rewards: ClassVar[bool] = False
    moves_reference: ClassVar[str] = "teacher_model_kind='ema'"
    rejected: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("seq_kd", "loss_type", "distillation_alpha"), "the loss is the divergence that beta chooses; remove it"
        ),
        "distillation_topk": "distributions are compared over all ids, without tensors of tokens x ids; remove it",
        "max_length": "prompts are never cut: max_completion_length bounds completions",
        "disable_dropout_teacher": "a teacher is always in eval mode; remove it",
    }
    never_act: ClassVar[Mapping[str, EffectCondition]] = {
        **dict.fromkeys(
            ("kl_estimator", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), _NO_REFERENCE
        ),
        **dict.fromkeys(("epsilon", "epsilon_high", "old_policy", "vllm_importance_sampling_correction"), _HAS_RATIO),
        **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty"), _GENERATES),
        "dynamic_sampling_rounds": never("completions teach whatever their rewards are; remove it"),
    }

    num_generations: int = redeclared(OnlineArguments, "num_generations", 1)
    beta: float = argument(
        1.0,
        "Divergence of policy p from teacher q: 0 is forward KL(q|p), 1 reverse KL(p|q), between them the generalised JSD.",
        within(0, 1),
    )
    distillation_mode: str = argument(
        "full_logits",
        "full_logits: the divergence of distributions, exactly; sampled_token: reverse KL of the sampled tokens, as advantages.",
        one_of(DistillationMode),
    )
    distillation_weight: float = argument(
        1.0,
        "Weight w of the teacher: the loss is w * divergence + (1 - w) * GRPO's loss; with sampled_token the advantages are "
        "added so.",
        within(0, 1),
    )
    lmbda: float = argument(
        1.0,
        "Share of prompts whose completion the policy generates; the remaining prompts take the dataset's `completion`.",
        within(0, 1),
    )
    teacher_model_name_or_path: str | None = model_argument(None, "Name or path of the teacher.")
    teacher_model_revision: str | None = model_argument(None, "Revision of the teacher on the hub.")
    teacher_model_init_kwargs: dict[str, Any] | str | None = model_argument(
        None, "Arguments of from_pretrained for the teacher (JSON), such as a quantization_config.", MAPPING
    )
    teacher_model_kind: str | None = argument(
        None,
        "Teacher without a teacher_model: live, the policy itself, which reads a privileged_context; ema, an average of the "
        "policy; base, the policy before training (under an adapter, without it).",
        one_of(TeacherKind, None),
    )
    teacher_update_rate: float = argument(
        0.05, "Weight of the policy in each update of its average.", within(0, 1), _AVERAGES
    )
    teacher_sync_steps: int = argument(1, "Steps between updates of the average.", at_least(1), _AVERAGES)
    use_successful_as_teacher: bool = argument(
        False,
        "The teacher reads a completion that succeeds (success_reward, success_threshold) as privileged_context of its prompt's "
        "other completions (SDPO).",
    )
    teacher_prompt_template: str = argument(
        _TEMPLATE,
        "Prompt that the teacher reads of a row with a privileged_context.",
        Check(_is_template, "must be a format string with {prompt} and {privileged_context}"),
    )

    @property
    def reference_sync(self) -> ReferenceSync | None:
        is_average = self.teacher_model_kind == "ema"
        return ReferenceSync(self.teacher_update_rate, self.teacher_sync_steps) if is_average else None


@dataclass(frozen=True)
class DistillationSettings:
    """Settings of distillation.

    beta     the kind of divergence (see `naive_divergence`)
    mode     whether distributions are compared, or the sampled tokens alone
    weight   the teacher's part of the loss; the rest is GRPO's
    policy   settings of GRPO's loss; None if there is no such part
    """

    beta: float
    mode: DistillationMode = "full_logits"
    weight: float = 1.0
    policy: GRPOSettings | None = None


@dataclass(frozen=True)
class TeacherSettings:
    """The teacher that the arguments describe, and the data that it needs.

    name              name or path of its model; `loading` are the arguments of `from_pretrained` for a name
    kind              of a teacher without a model; None for the base under an adapter
    prompt_template   of the prompts that it reads
    needs_context     without a privileged context nothing would be learned
    dataset_share     share of prompts that take the dataset's completion
    reads_successes   completions that succeed are the context of their group's others
    """

    name: str | None
    loading: Mapping[str, Any] = field(repr=False)  # may have an access token
    kind: TeacherKind | None = None
    prompt_template: str = _TEMPLATE
    needs_context: bool = False
    dataset_share: float = 0.0
    reads_successes: bool = False


def resolve_distillation(args: DistillationArguments, online: OnlineSettings) -> DistillationSettings:
    """Return the settings; ArgumentError for arguments that exclude each other.

    Logs a warning of a JSD whose gradient is far smaller than a KL's, which vanishes at both ends.
    """
    _check_combinations(args, online)
    _check_siblings(args, online)
    if any(low < args.beta < high for low, high in ((0.0, 0.1), (0.9, 1.0))):
        logger.warning(
            "beta=%g weighs the sides of the JSD so unequally that its gradient is far smaller than those of the KLs at 0 and 1: "
            "gradient clipping then acts seldom.",
            args.beta,
        )
    mode: Any = args.distillation_mode
    has_policy_loss = mode == "sampled_token" or args.distillation_weight < 1
    policy = _policy_settings(args, online) if has_policy_loss else None
    return DistillationSettings(args.beta, mode, args.distillation_weight, policy)


def _check_combinations(args: DistillationArguments, online: OnlineSettings) -> None:
    sampled, weight = args.distillation_mode == "sampled_token", args.distillation_weight
    require(
        not sampled or args.beta == 1,
        f"distillation_mode='sampled_token' is reverse KL and conflicts with beta={args.beta}: set beta=1, or "
        "distillation_mode='full_logits'.",
    )
    require(
        weight == 1 or (args.num_generations > 1 and online.facts.num_rewards != 0),
        f"distillation_weight={weight} leaves a part of the loss to rewards: pass reward_funcs, and num_generations of at least 2.",
    )
    require(
        args.lmbda == 1 or (args.num_generations == 1 and weight == 1 and not sampled),
        f"lmbda={args.lmbda} trains on completions that the policy did not write, which have no ratio and no group: set "
        "num_generations=1, distillation_weight=1 and distillation_mode='full_logits', or lmbda=1.",
    )
    require(
        args.lmbda == 1 or not online.facts.has_tools,
        f"lmbda={args.lmbda} does not go with tools and environments, which the dataset's completions did not call: set lmbda=1.",
    )


def _check_siblings(args: DistillationArguments, online: OnlineSettings) -> None:
    require(
        not args.use_successful_as_teacher
        or (args.num_generations > 1 and online.facts.num_rewards != 0 and not online.facts.has_tools),
        "use_successful_as_teacher shows the teacher other completions of a prompt, as text: pass reward_funcs and num_generations "
        "of at least 2, without tools and environments.",
    )


def _policy_settings(args: DistillationArguments, online: OnlineSettings) -> GRPOSettings:
    """Return the settings of GRPO's loss, as the mean over the step's tokens."""
    old_policy = resolve_old_policy(args)
    reuses_old = online.rollout.num_steps > 1 and old_policy == "policy"
    return GRPOSettings(
        loss_type="dapo",
        importance_level="token",
        clip_low=args.epsilon,
        clip_high=clip_high(args),
        delta=None,
        scale_rewards="group",
        aggregation="sum_then_normalize",
        reward_weights=online.reward_weights,
        beta=0.0,
        kl_estimator="k3",
        bias_corrected_kl=False,
        entropy_bonus=None,
        top_entropy_quantile=1.0,
        max_completion_length=args.max_completion_length,
        drop_equal_groups=False,
        score_old=reuses_old or args.distillation_mode == "sampled_token",
        correction=resolve_correction(args),
        old_policy=old_policy,
    )


def resolve_teacher(args: DistillationArguments) -> TeacherSettings:
    """Return the settings of the teacher."""
    loading: Any = args.teacher_model_init_kwargs or {}
    revision = {} if args.teacher_model_revision is None else {"revision": args.teacher_model_revision}
    kind: Any = args.teacher_model_kind
    loading = {**rename_dtype(loading), **revision}
    needs_context = kind is not None and args.distillation_weight == 1 and not args.use_successful_as_teacher
    return TeacherSettings(
        args.teacher_model_name_or_path,
        loading,
        kind,
        args.teacher_prompt_template,
        needs_context=needs_context,
        dataset_share=1 - args.lmbda,
        reads_successes=args.use_successful_as_teacher,
    )


def check_teacher_kind(teacher: TeacherSettings, has_adapter: bool, *, has_model: bool) -> None:
    """Raise ArgumentError for no teacher, for two, and for an average under an adapter."""
    require(
        not has_model or teacher.kind is None,
        f"teacher_model_kind={teacher.kind!r} conflicts with teacher_model, since each is the teacher: remove one of the two.",
    )
    require(
        teacher.kind != "ema" or not has_adapter,
        "teacher_model_kind='ema' averages all weights, but under an adapter the base is not trained: set 'live' or 'base'.",
    )
    require(
        has_model or has_adapter or teacher.kind is not None,
        "there is no teacher: pass teacher_model, or teacher_model_kind, or a peft_config, under which the base without its "
        "adapter can teach.",
    )


def refuse_teacher_under_tp(size: int) -> None:
    """Raise ArgumentError if `size` devices of a tensor parallel group share each tensor."""
    require(
        size == 1,
        "distillation does not go with tensor parallelism, under which no device has the teacher's whole head: shard with fsdp2 "
        "or zero3.",
    )

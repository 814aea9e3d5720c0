"""The parts of a run, and how an online trainer prepares its own before a device is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import nn
from transformers import set_seed

from lowpeak.algorithms import Algorithm
from lowpeak.arguments import (
    ColocateSettings,
    DistillationArguments,
    EffectReport,
    EvaluationSettings,
    OnlineSettings,
    ServerSettings,
    TeacherSettings,
    ToolSettings,
    VllmSettings,
    make_settings,
    require,
    reset_idle_arguments,
    resolve_online,
    resolve_teacher,
)
from lowpeak.data import check_special_tokens
from lowpeak.environments import Toolset
from lowpeak.errors import ArgumentError
from lowpeak.heads import check_embedded_tokens, is_peft, num_embeddings
from lowpeak.models import DRY_RUN, convert_trainable, disable_dropout, load_policy, load_reference, load_tokenizer
from lowpeak.parallel import check_devices
from lowpeak.rewards import Reward, as_list, make_rewards
from lowpeak.setup.preflight import check_outputs
from lowpeak.setup.teacher import load_teacher, shared_ids
from lowpeak.training import SuccessCriterion
from lowpeak.vllm import connect_servers, require_vllm
from lowpeak.vllm.serving import SERVER_URLS


@dataclass(frozen=True)
class OnlineInputs:
    """Models, rewards and tokenizers as the user passed them to an online trainer."""

    model: Any
    reward_funcs: Any
    processing_class: Any
    reward_processing_classes: Any
    peft_config: Any
    ref_model: Any
    tools: Sequence[Callable[..., Any]] = ()
    environment_factory: Any = None
    has_turns: bool = False


@dataclass(frozen=True)
class RunParts:
    """Settings and loaded parts of a run.

    user_args   the arguments as the user gave them
    args        a copy with defaults in place of arguments without effect
    settings    what both resolved to

    `reference_model` is the reference, or a teacher's model. A `teacher` shares the first `num_shared_ids` ids with the policy.
    """

    user_args: Any
    args: Any
    settings: Any
    algorithm: Algorithm
    policy: nn.Module
    tokenizer: Any
    reference_model: nn.Module | None = None
    rewards: Sequence[Reward] = ()
    num_shared_ids: int | None = None
    teacher: TeacherSettings | None = None

    @cached_property
    def effects(self) -> EffectReport:
        """The arguments without effect in the run."""
        return EffectReport(self.user_args)

    @cached_property
    def row_effects(self) -> EffectReport:
        """The arguments without effect on some rows of the data."""
        return EffectReport(self.user_args, "on some rows")


@dataclass(frozen=True, kw_only=True)
class OnlineParts(RunParts):
    """Settings and loaded parts of an online run; `success` defines an evaluation's successes.

    `toolset` is None if completions are single turns.
    """

    settings: OnlineSettings
    success: SuccessCriterion
    toolset: Toolset | None

    def close_environments(self) -> None:
        if self.toolset is not None:
            self.toolset.close()


def prepare_online(
    inputs: OnlineInputs,
    user_args: Any,
    make_algorithm: Callable[[Any, OnlineSettings], Algorithm],
    attach_extra_modules: Callable[[nn.Module, Any, Any], None],
) -> OnlineParts:
    """Resolve the arguments, then load and check models, rewards and tokenizer.

    `make_algorithm(args, settings)` returns the algorithm. `attach_extra_modules(policy, model, args)` adds what else is
    trained, after the reference was copied from the policy.
    """
    # Arguments come first, so that a wrong one costs no loading.
    check_devices(bool(user_args.fsdp), user_args.model_parallel.tensor > 1)
    toolset = _make_toolset(inputs, user_args)
    own_rewards = [] if toolset is None else toolset.rewards()
    num_rewards = len(as_list(inputs.reward_funcs))
    num_replicas = user_args.world_size // user_args.model_parallel.tensor
    settings = resolve_online(
        *(user_args, num_replicas, num_rewards),
        num_own_rewards=len(own_rewards),
        has_tools=toolset is not None,
        has_turns=inputs.has_turns,
        has_adapter=inputs.peft_config is not None or is_peft(inputs.model),
        has_programs=toolset is not None and toolset.has_programs,
    )
    args = reset_idle_arguments(user_args, settings.facts)
    algorithm = make_algorithm(args, settings)
    if not isinstance(algorithm, Algorithm):
        raise ArgumentError(f"make_algorithm returned {algorithm!r:.80}, and must return a lowpeak.Algorithm.")
    check_teacher_arguments(algorithm, args)
    set_seed(args.seed)  # before anything is made: an adapter's first weights are random
    check_engine(settings.vllm, args.model_parallel.tensor, connects=isinstance(inputs.model, str))
    check_outputs(args)
    rewards = _make_rewards(inputs, own_rewards, settings, args)
    success = _success_criterion(user_args, settings.evaluation, rewards)
    policy = load_policy(
        inputs.model,
        settings.model,
        peft_config=inputs.peft_config,
        model_parallel=args.model_parallel,
        device=None if args.fsdp else args.device,
    )
    tokenizer = load_tokenizer(inputs.processing_class, inputs.model, settings.model.trust_remote_code)
    check_special_tokens(tokenizer, num_embeddings(policy))
    teacher = resolve_teacher(args) if isinstance(args, DistillationArguments) else None
    reference, num_shared_ids = _load_frozen(policy, inputs, settings, args, tokenizer, algorithm, teacher)
    attach_extra_modules(policy, inputs.model, args)
    convert_trainable(policy, settings.model)
    if settings.model.disable_dropout:
        for model in filter(None, (policy, reference)):
            disable_dropout(model)
    if toolset is not None:
        toolset.check_template(tokenizer, settings.prompts.chat_template_kwargs)
    return OnlineParts(
        *(user_args, args, algorithm, policy, tokenizer, reference, rewards, num_shared_ids, teacher),
        settings=settings,
        success=success,
        toolset=toolset,
    )


def _load_frozen(
    policy: nn.Module,
    inputs: OnlineInputs,
    settings: OnlineSettings,
    args: Any,
    tokenizer: Any,
    algorithm: Algorithm,
    teacher: TeacherSettings | None,
) -> tuple[nn.Module | None, int | None]:
    """Return the separate reference or teacher, if any, and the number of ids shared with a teacher."""
    if teacher is None:
        return load_run_reference(policy, inputs, settings, args, tokenizer, algorithm), None
    given, placed = inputs.ref_model, {"model_parallel": args.model_parallel, "device": args.device}
    model = load_teacher(policy, inputs.model, given, teacher, settings.model, **placed)
    if model is not None:
        check_embedded_tokens("the teacher", model, policy, tokenizer, "use a teacher with the policy's tokenizer")
    loaded = None if teacher.kind is not None else model  # the policy's own teacher has its ids
    return model, shared_ids(policy, tokenizer, loaded, given or teacher.name, settings.model)


def _make_toolset(inputs: OnlineInputs, args: Any) -> Toolset | None:
    if not inputs.tools and inputs.environment_factory is None:
        return None
    toolset = Toolset(inputs.tools, inputs.environment_factory, make_settings(ToolSettings, args))
    require(
        not (toolset.has_programs and args.full_determinism),
        "full_determinism=True with an environment that has a method run: when its requests arrive decides which turns share a "
        "forward; leave full_determinism out (token ids in fp32 do not depend on it).",
    )
    credit = getattr(args, "turn_credit", "outcome")
    require(
        not toolset.has_programs or toolset.max_branches == 1 or credit == "outcome",
        f"turn_credit={credit!r} with max_branches={toolset.max_branches}: turns of different branches have no order; "
        "set turn_credit='outcome', or max_branches=1.",
    )
    return toolset


def _make_rewards(
    inputs: OnlineInputs, own_rewards: Sequence[Reward], settings: OnlineSettings, args: Any
) -> list[Reward]:
    """Return the user's rewards, then those of the environments, which have no tokenizers."""
    tokenizers, rewards = inputs.reward_processing_classes, [*as_list(inputs.reward_funcs), *own_rewards]
    if not rewards:  # of distillation
        return []
    return make_rewards(
        rewards,
        None if tokenizers is None else [*as_list(tokenizers), *[None] * len(own_rewards)],
        model_kwargs={"trust_remote_code": True} if settings.model.trust_remote_code else {},
        chat_template_kwargs=settings.prompts.chat_template_kwargs,
        device=args.device,
    )


def check_engine(settings: VllmSettings | None, tensor_parallel: int = 1, *, connects: bool = False) -> None:
    """Raise an error if vLLM is not installed, or with `connects` if a server does not answer in time.

    Raises ArgumentError for vLLM with a policy whose tensors are sharded over `tensor_parallel` processes.
    """
    if settings is not None and tensor_parallel > 1:
        raise ArgumentError(
            f"use_vllm=True does not go with tp_size={tensor_parallel}: the processes that share a policy's tensors would "
            "each request the same completions. Shard the policy with fsdp2 or zero3, or remove use_vllm."
        )
    where = None if settings is None else settings.where
    if isinstance(where, ColocateSettings):
        require_vllm()
    # Servers that the command started itself load at the same time as the policy; a dry run needs none.
    if isinstance(where, ServerSettings) and connects and SERVER_URLS not in os.environ and not DRY_RUN.get():
        connect_servers(where)


def needs_reference(algorithm: Algorithm, settings: Any) -> bool:
    """Return whether a reference or a teacher scores the run's steps, or a reference its data before the first step."""
    is_used = "reference" in algorithm.needs or algorithm.divergence is not None
    return is_used or getattr(settings, "precompute_ref_log_probs", False)


class ReferenceInputs(Protocol):
    """The models that the user passed to a trainer."""

    @property
    def model(self) -> Any: ...

    @property
    def ref_model(self) -> Any: ...


def check_teacher_arguments(algorithm: Algorithm, args: Any) -> None:
    """Raise ArgumentError for an algorithm with a divergence whose config cannot name a teacher."""
    require(
        algorithm.divergence is None or isinstance(args, DistillationArguments),
        f"the algorithm {algorithm.name!r} has a divergence, and {type(args).__name__} names no teacher: derive the trainer from "
        "DistillationTrainer.",
    )


def load_run_reference(
    policy: nn.Module, inputs: ReferenceInputs, settings: Any, args: Any, tokenizer: Any, algorithm: Algorithm
) -> nn.Module | None:
    """Return the run's separate reference; None if it has none, or if it is the policy without its adapter."""
    if needs_reference(algorithm, settings):
        if settings.reference_sync is not None and is_peft(policy):
            raise ArgumentError(
                "sync_ref_model moves the weights of a separate reference, but under an adapter the reference is the policy "
                "without it: remove sync_ref_model, or train without an adapter."
            )
        placed = {"model_parallel": args.model_parallel, "device": args.device}
        reference = load_reference(policy, inputs.model, settings.model, inputs.ref_model, **placed)
        if reference is not None:
            remedy = "pass a reference with the same tokenizer"
            check_embedded_tokens("ref_model", reference, policy, tokenizer, remedy)
        return reference
    if inputs.ref_model is not None:
        raise ArgumentError("ref_model has no effect: beta is 0, so there is no reference; remove it, or set beta.")
    return None


def _success_criterion(args: Any, settings: EvaluationSettings, rewards: Sequence[Reward]) -> SuccessCriterion:
    names, name = [reward.name for reward in rewards], settings.success_reward
    if name is not None and name not in names:
        raise ArgumentError(f"success_reward={name!r} is not one of the rewards: {', '.join(names)}.")
    compared = any(metric in (args.metric_for_best_model or "") for metric in ("accuracy", "pass@"))
    is_chosen = compared or not args.given.isdisjoint(("success_reward", "success_threshold"))
    return SuccessCriterion(0 if name is None else names.index(name), settings.success_threshold, is_chosen)

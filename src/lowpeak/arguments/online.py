"""Arguments of all online trainers beside rollouts: rewards, reference, clipping, correction, evaluation, printing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from lowpeak.arguments.base import RunSettings, resolve_memory, resolve_model, resolve_passes, run_facts
from lowpeak.arguments.correction import CorrectionArguments, check_staleness, resolve_old_policy
from lowpeak.arguments.declare import (
    NOT_NEGATIVE,
    Check,
    EffectCondition,
    Hardware,
    RunFacts,
    above_zero,
    are_finite,
    argument,
    at_least,
    evaluation_argument,
    if_on,
    logging_argument,
    make_settings,
    one_of,
    require,
    reward_argument,
    within,
)
from lowpeak.arguments.rollout import RolloutArguments, RolloutSettings, resolve_rollout
from lowpeak.arguments.sampling import Sampling, resolve_sampling
from lowpeak.arguments.text import parse_bytes
from lowpeak.arguments.tools import ToolArguments, ToolSettings
from lowpeak.arguments.validation import check_values, reset_idle_arguments
from lowpeak.arguments.vllm import VllmArguments, VllmSettings, resolve_vllm

KLEstimator = Literal["k1", "k2", "k3"]

GATHER_ALL = 1 << 62  # a gather budget larger than any model

GROUP_SIZE = Check(lambda x: x >= 2, "must be at least 2: each completion is compared with others of its group")
HAS_REFERENCE = EffectCondition(
    lambda args, facts: args.beta != 0, "beta is 0, so there is no reference model; remove it, or set beta"
)
HAS_REWARDS = EffectCondition(lambda args, facts: facts.num_rewards != 0, "the run has no reward; remove it")
HAS_KL = EffectCondition(HAS_REFERENCE.holds, "beta is 0, so there is no KL; remove it, or set beta")
REUSES_ROLLOUTS = EffectCondition(
    lambda args, facts: facts.num_steps != 1 or resolve_old_policy(args) == "sampler",
    "each rollout serves one step, so the ratio is exactly 1 and never clipped; remove it, or train off-policy with more "
    "num_iterations or steps_per_generation, or with old_policy='sampler'",
)
_SYNCS_REFERENCE = (
    # TRL's SyncRefModelCallback reads the values.
    replace(if_on("sync_ref_model"), keeps_value=True),
    HAS_REFERENCE,
)
_PRINTS_COMPLETIONS = if_on("log_completions")


@dataclass(repr=False)
class OnlineArguments(CorrectionArguments, VllmArguments, ToolArguments, RolloutArguments):
    """Arguments of all online trainers; `needs_rewards` is whether an algorithm trains on rewards."""

    needs_rewards: ClassVar[bool] = True
    moves_reference: ClassVar[str] = "sync_ref_model=True"  # the argument that asks for updates of the reference
    num_generations_eval: int | None = evaluation_argument(
        None, "Sampled completions of each prompt in evaluation (None: num_generations).", at_least(1)
    )
    beta: float = argument(0.0, "KL coefficient; at 0 no reference model is loaded.", NOT_NEGATIVE)
    kl_estimator: str = argument("k3", "KL estimator per token: k1, k2 or k3.", one_of(KLEstimator), HAS_REFERENCE)
    epsilon: float = argument(
        0.2,
        "Clip range of the ratio below 1.",
        Check(lambda x: 0 <= x < 1, "must be in [0, 1): the ratio is clipped to 1 - epsilon from below"),
        REUSES_ROLLOUTS,
    )
    epsilon_high: float | None = argument(
        None,
        "Clip range of the ratio above 1 (None: epsilon).",
        Check(lambda x: x is None or x >= 0, "must be 0 or more: the ratio is clipped to 1 + epsilon_high"),
        REUSES_ROLLOUTS,
    )
    reward_weights: list[float] | None = reward_argument(
        None,
        "Weights of the rewards (None: all 1).",
        Check(lambda x: x is None or are_finite(x), "must be a list of finite numbers"),
        HAS_REWARDS,
    )
    reward_timeout: float | None = reward_argument(
        None,
        "Time limit of one call of a reward, in seconds (None: no limit).",
        above_zero("a number of seconds"),
        HAS_REWARDS,
    )
    reward_failures: str = reward_argument(
        "raise",
        "If a reward fails: 'raise', or 'none' to leave its completions without that reward.",
        one_of(Literal["raise", "none"]),
        HAS_REWARDS,
    )
    mask_truncated_completions: bool = argument(
        False, "Exclude completions that were truncated at max_completion_length from the loss."
    )
    sync_ref_model: bool = argument(
        False, "Move the reference model towards the policy during training.", acts_if=HAS_REFERENCE
    )
    ref_model_mixup_alpha: float = argument(
        0.6, "Weight of the policy in that update of the reference model.", within(0, 1), _SYNCS_REFERENCE
    )
    ref_model_sync_steps: int = argument(
        512, "Steps between updates of the reference model.", at_least(1), _SYNCS_REFERENCE
    )
    success_reward: str | None = evaluation_argument(
        None, "Name of the reward that measures success in evaluation (None: the first).", acts_if=HAS_REWARDS
    )
    success_threshold: float = evaluation_argument(1.0, "Least reward of a successful completion.", acts_if=HAS_REWARDS)
    log_completions: bool = logging_argument(
        False, "Print a table of completions when metrics are logged; send it to trackers."
    )
    log_completions_steps: int = logging_argument(
        1, "Least number of steps between two tables.", at_least(1), _PRINTS_COMPLETIONS
    )
    num_completions_to_print: int | None = logging_argument(
        None, "Rows of the table (None: all).", at_least(1), _PRINTS_COMPLETIONS
    )
    log_unique_prompts: bool = logging_argument(
        False, "Print one row per prompt in the table.", acts_if=_PRINTS_COMPLETIONS
    )
    num_completions_with_tokens: int = logging_argument(
        1,
        "Completions of each rollout whose tokens' log-probs, entropies and mismatches are written into the journal.",
        at_least(0),
    )

    @property
    def reference_sync(self) -> ReferenceSync | None:
        """The updates of the run's reference; None if it stays as it was before training."""
        moves = self.sync_ref_model and self.beta
        return ReferenceSync(self.ref_model_mixup_alpha, self.ref_model_sync_steps) if moves else None


@dataclass(frozen=True)
class ReferenceSync:
    """Updates reference = share * policy + (1 - share) * reference, every `every` steps (TR-DPO, arXiv 2404.09656)."""

    share: float
    every: int


@dataclass(frozen=True)
class PromptSettings:
    """How prompts are read: in which order, with which template, and whether those that are too long are dropped.

    `vllm_max_model_length` bounds a prompt with its completion, beside the contexts of the models.
    """

    shuffle_dataset: bool
    chat_template_kwargs: Mapping[str, Any]
    overlong_prompts: Literal["error", "drop"]
    vllm_max_model_length: int | None


@dataclass(frozen=True)
class EvaluationSettings:
    """How evaluations generate and count successes.

    num_generations     completions of each prompt besides the greedy one
    samples             whether these are sampled; if not, the trainer cannot train
    num_rows            completions that each rank generates together; None for as many as fit in the KV cache
    success_reward      name of the reward that measures success; None for the first
    success_threshold   least reward of a successful completion
    """

    num_generations: int
    samples: bool
    num_rows: int | None
    success_reward: str | None
    success_threshold: float


@dataclass(frozen=True)
class TableSettings:
    """The table of completions in the terminal: least steps between two, its rows (None: all), and one row per prompt."""

    log_completions_steps: int
    num_completions_to_print: int | None
    log_unique_prompts: bool


@dataclass(frozen=True)
class OnlineSettings(RunSettings):
    """Settings of an online run, which adds rollouts, sampling, evaluation, reference updates, prompts, rewards, vLLM.

    `max_staleness` rollouts are generated ahead. `facts` are the facts of the run that were known when its arguments were
    resolved.
    """

    rollout: RolloutSettings
    max_staleness: int
    sampling: Sampling
    evaluation: EvaluationSettings
    reference_sync: ReferenceSync | None
    reward_weights: tuple[float, ...]
    reward_failures: Literal["raise", "none"]
    reward_timeout: float | None
    mask_truncated: bool
    prompts: PromptSettings
    table: TableSettings | None
    num_completions_with_tokens: int
    vllm: VllmSettings | None
    cuda_graphs: bool
    tools: ToolSettings
    facts: RunFacts


def resolve_online(
    args: Any,
    world_size: int,
    num_rewards: int,
    hardware: Hardware | None = None,
    num_own_rewards: int = 0,
    has_tools: bool | None = None,
    has_turns: bool | None = None,
    has_adapter: bool | None = None,
    has_programs: bool | None = None,
) -> OnlineSettings:
    """Return the settings of an online run on `world_size` ranks with `num_rewards` reward functions.

    `hardware` is where it will run; None: what this process has. Environments have `num_own_rewards` further rewards, with
    weight 1. `has_tools`, `has_turns`, `has_adapter` and `has_programs` are those of `RunFacts`.
    """
    check_values(args)
    require(
        num_rewards + num_own_rewards > 0 or not args.needs_rewards,
        "reward_funcs is empty: pass at least one function or reward model, or an environment with get_reward.",
    )
    rollout = resolve_rollout(args, world_size)
    known = {"has_tools": has_tools, "has_turns": has_turns, "has_adapter": has_adapter, "has_programs": has_programs}
    facts = run_facts(args, hardware, num_steps=rollout.num_steps, num_rewards=num_rewards + num_own_rewards, **known)
    _check_online(args, world_size)
    args = reset_idle_arguments(args, facts)
    vllm = resolve_vllm(args, world_size)
    check_staleness(args, vllm, facts)
    return OnlineSettings(
        model=resolve_model(args),
        rollout=rollout,
        max_staleness=args.max_staleness,
        sampling=resolve_sampling(args),
        evaluation=make_settings(
            EvaluationSettings,
            args,
            num_generations=args.num_generations_eval or args.num_generations,
            samples=(args.generation_kwargs or {}).get("do_sample") in (None, True),
            num_rows=args.per_device_eval_batch_size,
        ),
        reference_sync=args.reference_sync,
        memory=resolve_memory(args, hardware, gather_budget=resolve_gather_budget(args)),
        reward_weights=(*_resolve_weights(args, num_rewards), *(1.0,) * num_own_rewards),
        mask_truncated=args.mask_truncated_completions,
        passes=resolve_passes(args),
        log_all=args.log_all,
        prompts=make_settings(PromptSettings, args, chat_template_kwargs=args.chat_template_kwargs or {}),
        table=make_settings(TableSettings, args) if args.log_completions else None,
        num_completions_with_tokens=args.num_completions_with_tokens,
        reward_failures=args.reward_failures,
        reward_timeout=args.reward_timeout,
        vllm=vllm,
        cuda_graphs=args.cuda_graphs,
        tools=make_settings(ToolSettings, args),
        facts=facts,
    )


def resolve_gather_budget(args: RolloutArguments) -> int | None:
    """Return the gather budget in bytes, `GATHER_ALL`, or None for automatic; ArgumentError if its three names contradict."""
    budget = args.gather_budget
    size = None if budget in (None, "auto") else parse_bytes(budget)
    require(
        budget in (None, "auto") or size is not None,
        f"gather_budget={budget!r} must be 'auto', a number of bytes, or a size such as '8GiB' or '500MB'.",
    )
    meanings = {
        "gather_budget": size,
        "ds3_gather_for_generation": GATHER_ALL if args.ds3_gather_for_generation else 0,
        "disable_unwrapping_for_generation": 0 if args.disable_unwrapping_for_generation else GATHER_ALL,
    }
    budgets = {name: meaning for name, meaning in meanings.items() if getattr(args, name) is not None}
    shown = " and ".join(f"{name}={getattr(args, name)!r}" for name in budgets)
    require(
        len(set(budgets.values())) <= 1, f"{shown} contradict each other: keep gather_budget, and remove the others."
    )
    return next(iter(budgets.values()), None)


def _check_online(args: Any, world_size: int) -> None:
    require(
        args.metric_for_best_model not in ("loss", "eval_loss") or not args.needs_rewards,
        "metric_for_best_model='loss', transformers' default with load_best_model_at_end, does not rank policies, since "
        "advantages compare completions of the same policy; set metric_for_best_model='reward' or 'accuracy' "
        "(greater is better).",
    )
    check_reference_sync(args.reference_sync, args, world_size, args.moves_reference)


def check_reference_sync(sync: ReferenceSync | None, args: Any, world_size: int, name: str) -> None:
    """Raise ArgumentError for a moving reference that could not be updated where it is; the argument `name` asks for it."""
    require(
        sync is None or not args.offload_frozen_models or world_size > 1,
        f"{name} conflicts with offload_frozen_models=True on one device: models in host memory are not averaged; "
        "remove one of the two.",
    )


def clip_high(args: OnlineArguments) -> float:
    """Return the clip range of the ratio above 1."""
    return float(args.epsilon if args.epsilon_high is None else args.epsilon_high)


def _resolve_weights(args: OnlineArguments, num_rewards: int) -> tuple[float, ...]:
    if args.reward_weights is None:
        return (1.0,) * num_rewards
    require(
        len(args.reward_weights) == num_rewards,
        f"reward_weights has {len(args.reward_weights)} values for {num_rewards} rewards; set one value per reward.",
    )
    return tuple(float(weight) for weight in args.reward_weights)

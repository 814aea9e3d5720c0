"""The arguments of every online run beside its rollouts: rewards, the reference, clipping, evaluation, what is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lowpeak.arguments.base import MemorySettings, facts_of, resolve_memory
from lowpeak.arguments.declare import (
    NOT_NEGATIVE,
    ActsWhen,
    Check,
    Facts,
    above_zero,
    are_finite,
    argument,
    at_least,
    if_on,
    in_evaluation,
    in_logging,
    in_rewards,
    in_vllm,
    one_of,
    require,
    within,
)
from lowpeak.arguments.rollout import (
    RolloutArguments,
    RolloutSettings,
    Sampling,
    resolve_gather_budget,
    resolve_rollout,
    resolve_sampling,
)
from lowpeak.arguments.validation import acting, check_values
from lowpeak.arguments.vllm import USES_VLLM, VllmArguments, VllmSettings, resolve_vllm

KLEstimator = Literal["k1", "k2", "k3"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

GROUPS = Check(lambda x: x >= 2, "must be at least 2: a completion is compared with the others of its group")
HAS_REFERENCE = ActsWhen(
    lambda args, facts: args.beta != 0, "beta is 0, so there is no reference; set beta or remove it"
)
HAS_KL = ActsWhen(HAS_REFERENCE.holds, "beta is 0, so there is no KL; set beta or remove it")
REUSES_ROLLOUTS = ActsWhen(
    lambda args, facts: facts.num_steps != 1,
    "each rollout serves one step, so the ratio is exactly 1 and nothing is clipped; raise num_iterations or "
    "steps_per_generation, or remove it",
)
_MOVES_REFERENCE = (
    if_on("sync_ref_model"),
    HAS_REFERENCE,
)
_PRINTS_COMPLETIONS = if_on("log_completions")
_CORRECTED = (USES_VLLM, if_on("vllm_importance_sampling_correction"))


@dataclass(repr=False)
class CorrectionArguments:
    """Whether the policy loss is weighed by how likely the trainer makes a completion over how likely vLLM did, and how."""

    vllm_importance_sampling_correction: bool = in_vllm(
        True,
        "Weigh the policy loss by how likely the trainer makes a completion, over how likely vLLM did.",
        acts=USES_VLLM,
    )
    vllm_importance_sampling_mode: str = in_vllm(
        "sequence_mask",
        "That weight per token or per completion, cut to its bounds or 0 beyond them: token_truncate, token_mask, "
        "sequence_truncate or sequence_mask.",
        one_of(CorrectionMode),
        _CORRECTED,
    )
    vllm_importance_sampling_clip_max: float | None = in_vllm(
        3.0, "The weight's upper bound (None: none).", above_zero(), _CORRECTED
    )
    vllm_importance_sampling_clip_min: float | None = in_vllm(
        None, "The weight's lower bound (None: none).", NOT_NEGATIVE, _CORRECTED
    )


@dataclass(repr=False)
class OnlineArguments(CorrectionArguments, VllmArguments, RolloutArguments):
    """What all online trainers take."""

    num_generations_eval: int | None = in_evaluation(
        None, "Sampled completions of each prompt in evaluation.", at_least(1)
    )
    beta: float = argument(0.0, "KL coefficient; 0 loads no reference model.", NOT_NEGATIVE)
    kl_estimator: str = argument("k3", "KL estimate per token: k1, k2 or k3.", one_of(KLEstimator), HAS_REFERENCE)
    epsilon: float = argument(
        0.2,
        "The ratio's clip range below 1.",
        Check(lambda x: 0 <= x < 1, "must be in [0, 1): the ratio is clipped to 1 - epsilon from below"),
        REUSES_ROLLOUTS,
    )
    epsilon_high: float | None = argument(
        None,
        "The clip range above 1 (None: epsilon).",
        Check(lambda x: x is None or x >= 0, "must be 0 or more: the ratio is clipped to 1 + epsilon_high"),
        REUSES_ROLLOUTS,
    )
    reward_weights: list[float] | None = in_rewards(
        None,
        "A weight for each reward (None: all 1).",
        Check(lambda x: x is None or are_finite(x), "must be a list of finite numbers"),
    )
    reward_timeout: float | None = in_rewards(
        None, "Seconds that one call of a reward may take.", above_zero("a number of seconds")
    )
    reward_failures: str = in_rewards(
        "raise",
        "A reward that fails: 'raise', or 'none': the row counts as not scored, and is counted.",
        one_of(Literal["raise", "none"]),
    )
    mask_truncated_completions: bool = argument(
        False, "Completions cut at max_completion_length take no part in the loss."
    )
    sync_ref_model: bool = argument(
        False, "Move the reference towards the policy as training goes on.", acts=HAS_REFERENCE
    )
    ref_model_mixup_alpha: float = argument(0.6, "The policy's share in that move.", within(0, 1), _MOVES_REFERENCE)
    ref_model_sync_steps: int = argument(512, "Steps between two such moves.", at_least(1), _MOVES_REFERENCE)
    success_reward: str | None = in_evaluation(
        None, "Name of the reward that says whether a completion succeeds (None: the first)."
    )
    success_threshold: float = in_evaluation(1.0, "A completion succeeds from this reward on.")
    log_completions: bool = in_logging(False, "Print a table of completions when metrics are logged.")
    log_completions_steps: int = in_logging(
        1, "Print that table at most once in so many steps.", at_least(1), _PRINTS_COMPLETIONS
    )
    num_completions_to_print: int | None = in_logging(
        None, "Rows of that table (None: all).", at_least(1), _PRINTS_COMPLETIONS
    )
    log_unique_prompts: bool = in_logging(False, "One row per prompt in that table.", acts=_PRINTS_COMPLETIONS)


@dataclass(frozen=True)
class ReferenceSync:
    """reference = share * policy + (1 - share) * reference, every so many steps (TR-DPO, arXiv 2404.09656)."""

    share: float
    every: int


@dataclass(frozen=True)
class Correction:
    """How far an engine that samples with weights of its own is from the trainer, as a weight of the policy loss.

    The weight is old over sampled probability, of each token or of a whole completion (`per_sequence`); beyond the bounds it
    is 0 (`masks`), or else the bound itself. A bound of None is none.
    """

    per_sequence: bool
    masks: bool
    minimum: float | None
    maximum: float | None


@dataclass(frozen=True)
class OnlineSettings:
    """All that an online run was told: rollouts, sampling, evaluation, the reference's movement, memory.

    `facts` are what was known of the run when its arguments were resolved.
    """

    rollout: RolloutSettings
    sampling: Sampling
    num_generations_eval: int
    eval_rows: int | None
    reference_sync: ReferenceSync | None
    memory: MemorySettings
    reward_weights: tuple[float, ...]
    mask_truncated: bool
    vllm: VllmSettings | None = None
    facts: Facts = Facts()


def resolve_online(args: Any, world_size: int, num_rewards: int) -> OnlineSettings:
    """Return the settings of an online run on `world_size` ranks with `num_rewards` reward functions."""
    check_values(args)
    require(num_rewards > 0, "no reward: pass at least one function or reward model as reward_funcs.")
    rollout = resolve_rollout(args, world_size)
    facts = facts_of(args, num_rewards=num_rewards, num_steps=rollout.num_steps)
    _check_online(args, world_size)
    args = acting(args, facts)
    return OnlineSettings(
        rollout=rollout,
        sampling=resolve_sampling(args),
        num_generations_eval=args.num_generations_eval or args.num_generations,
        eval_rows=args.per_device_eval_batch_size,
        reference_sync=ReferenceSync(args.ref_model_mixup_alpha, args.ref_model_sync_steps)
        if args.sync_ref_model
        else None,
        memory=resolve_memory(
            args,
            gather_budget=resolve_gather_budget(args),
            frozen_on_host=args.offload_frozen_models,
            idle_on_host=args.offload_during_rollout,
        ),
        reward_weights=_resolve_weights(args, num_rewards),
        mask_truncated=args.mask_truncated_completions,
        vllm=resolve_vllm(args, world_size),
        facts=facts,
    )


def _check_online(args: Any, world_size: int) -> None:
    require(
        args.metric_for_best_model not in ("loss", "eval_loss"),
        "metric_for_best_model='loss', transformers' default with load_best_model_at_end, does not tell a good policy from a "
        "bad one, since advantages compare a policy's own completions; set metric_for_best_model='reward' or 'accuracy' "
        "(greater is better).",
    )
    require(
        not (args.sync_ref_model and args.offload_frozen_models and args.beta) or world_size > 1,
        "sync_ref_model=True cannot act beside offload_frozen_models=True on one device: what waits in host memory is not "
        "averaged there; remove one of them.",
    )


def clip_high(args: Any) -> float:
    """Return how far above 1 a ratio is clipped."""
    return float(args.epsilon if args.epsilon_high is None else args.epsilon_high)


def _resolve_weights(args: Any, num_rewards: int) -> tuple[float, ...]:
    if args.reward_weights is None:
        return (1.0,) * num_rewards
    require(
        len(args.reward_weights) == num_rewards,
        f"reward_weights has {len(args.reward_weights)} values for {num_rewards} rewards; give one for each.",
    )
    return tuple(float(weight) for weight in args.reward_weights)


def resolve_correction(args: Any) -> Correction | None:
    """Return the correction of a run, None without vLLM or where it is off; ArgumentError for bounds that bound nothing."""
    if not args.use_vllm or not args.vllm_importance_sampling_correction:
        return None
    mode = args.vllm_importance_sampling_mode
    most, least = args.vllm_importance_sampling_clip_max, args.vllm_importance_sampling_clip_min
    require(
        most is None or least is None or least < most,
        f"vllm_importance_sampling_clip_min={least} must be below vllm_importance_sampling_clip_max={most}.",
    )
    require(
        mode.endswith("mask") or most is not None or least is not None,
        f"vllm_importance_sampling_mode={mode!r} cuts weights to their bounds, and there is none: give "
        "vllm_importance_sampling_clip_max, or vllm_importance_sampling_clip_min.",
    )
    return Correction(mode.startswith("sequence"), mode.endswith("mask"), least, most)

"""Flat arguments to the small frozen records that the code works with; what cannot act raises here, with the remedy."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowpeak.config.algorithm import EntropyBonus, GRPOSettings, RLOOSettings
from lowpeak.config.correction import resolve_correction
from lowpeak.config.gathering import resolve_gather_budget
from lowpeak.config.inapplicable import refuse_idle, refuse_inherited, require, said_as
from lowpeak.config.kinds import check_kinds
from lowpeak.config.memory import MemorySettings
from lowpeak.config.ranges import check_ranges, padding_multiple
from lowpeak.config.resolve_vllm import EVERY_ENGINE, resolve_vllm
from lowpeak.config.rollout import RolloutSettings, Sampling
from lowpeak.config.vllm import VllmSettings
from lowpeak.errors import ArgumentError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnlineSettings:
    """All that an online run was told: rollouts, sampling, evaluation, the reference's movement, memory."""

    rollout: RolloutSettings
    sampling: Sampling
    num_generations_eval: int
    eval_rows: int | None
    reference_sync: ReferenceSync | None
    memory: MemorySettings
    reward_weights: tuple[float, ...]
    mask_truncated: bool
    vllm: VllmSettings | None = None


@dataclass(frozen=True)
class ReferenceSync:
    """reference = share * policy + (1 - share) * reference, every so many steps (TR-DPO, arXiv 2404.09656)."""

    share: float
    every: int


def resolve_common(args: Any) -> MemorySettings:
    """What every trainer checks and takes: ranges, inherited arguments, memory sizes."""
    check_kinds(args)
    check_ranges(args)
    refuse_inherited(args)
    share_prompt = getattr(args, "share_prompt", False)  # supervised rows have prompts of their own
    require(
        not (share_prompt and args.padding_free is False),
        "share_prompt=True with padding_free=False: rows that share a prompt stand in one row without padding; remove "
        "padding_free=False, or share_prompt=True.",
    )
    _check_packing(args)
    return MemorySettings(
        micro_batch_tokens=args.micro_batch_tokens,
        logprob_chunk_size=args.logprob_chunk_size,
        kv_cache_bytes=getattr(args, "kv_cache_bytes", None),
        pad_to_multiple_of=padding_multiple(args.pad_to_multiple_of) or 1,
        padding_free=args.padding_free,
        packing=getattr(args, "packing", False),
        share_prompt=share_prompt,
        activation_offloading=args.activation_offloading,
        gather_budget=resolve_gather_budget(args),
        frozen_on_host=getattr(args, "offload_frozen_models", False),
        idle_on_host=getattr(args, "offload_during_rollout", False),
    )


_STRATEGIES = {
    "bfd_split": "a row's end would go on without what comes before it; split long rows beforehand, or raise max_length",
    "wrapped": "rows would be split anywhere and would see one another; join the texts beforehand",
}


def _check_packing(args: Any) -> None:
    """Refuse what TRL's packing does to rows and lowpeak does not; warn of what is counted in another way."""
    packing, strategy = getattr(args, "packing", False), getattr(args, "packing_strategy", "bfd")
    if getattr(args, "eval_packing", None) is not None:
        logger.warning(
            "eval_packing=%s has no effect: evaluation metrics are averaged over tokens, and rows are kept apart.",
            args.eval_packing,
        )
    refuse_idle(args, ("packing_strategy",), packing or strategy == "bfd", "packing is off; remove it")
    if not packing:
        return
    strategy = {"bfd-requeue": "bfd_split"}.get(strategy, strategy)
    require(
        strategy == "bfd",
        f"packing_strategy={strategy!r} is none of lowpeak's: {_STRATEGIES.get(strategy, 'it is unknown')}; use 'bfd'.",
    )
    require(
        args.padding_free is not False,
        "packing=True with padding_free=False: packed rows stand one after another without padding; remove one of them.",
    )
    logger.warning(
        "packing=True: rows stand one after another without padding, and a step takes per_device_train_batch_size x "
        "gradient_accumulation_steps x ranks rows of the data set, where TRL takes as many packed sequences of max_length "
        "tokens; raise per_device_train_batch_size to train on as many tokens a step."
    )


def resolve_online(args: Any, world_size: int, num_rewards: int) -> OnlineSettings:
    """The settings of an online run on `world_size` ranks with `num_rewards` reward functions."""
    memory = resolve_common(args)
    require(num_rewards > 0, "no reward: pass at least one function or reward model as reward_funcs.")
    require(
        args.metric_for_best_model not in ("loss", "eval_loss"),
        "metric_for_best_model='loss', transformers' default with load_best_model_at_end, does not tell a good policy from a "
        "bad one, since advantages compare a policy's own completions; set metric_for_best_model='reward' or 'accuracy' "
        "(greater is better).",
    )
    rollout = _resolve_rollout(args, world_size)
    refuse_idle(args, ("remove_unused_columns",), False, "columns go to the rewards; remove it")
    refuse_idle(
        args,
        ("ref_model_mixup_alpha", "ref_model_sync_steps"),
        args.sync_ref_model,
        "sync_ref_model is off; set sync_ref_model=True or remove it",
    )
    refuse_idle(
        args,
        ("sync_ref_model", "kl_estimator"),
        args.beta != 0,
        "beta is 0, so there is no reference; set beta or remove it",
    )
    refuse_idle(
        args,
        ("num_completions_to_print", "log_unique_prompts"),
        args.log_completions,
        "log_completions is off; set log_completions=True or remove it",
    )
    return OnlineSettings(
        rollout=rollout,
        sampling=_resolve_sampling(args),
        num_generations_eval=args.num_generations_eval or args.num_generations,
        eval_rows=args.per_device_eval_batch_size,
        reference_sync=ReferenceSync(args.ref_model_mixup_alpha, args.ref_model_sync_steps)
        if args.sync_ref_model
        else None,
        memory=memory,
        reward_weights=_resolve_weights(args, num_rewards),
        mask_truncated=args.mask_truncated_completions,
        vllm=resolve_vllm(args, world_size),
    )


def resolve_grpo(args: Any, online: OnlineSettings) -> GRPOSettings:
    """GRPO's settings; an argument that the loss type or the run leaves idle is an ArgumentError."""
    require_groups(args)
    cispo = args.loss_type == "cispo"
    reused = online.rollout.num_steps > 1
    _refuse_idle_grpo(args, cispo, reused, len(online.reward_weights))
    clip_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.importance_sampling_level == "sequence" and args.loss_type != "grpo":
        logger.warning(
            "importance_sampling_level='sequence' with loss_type=%r: the loss sums over tokens, so a completion weighs as much as "
            "it has tokens. GSPO's objective weighs completions alike: set loss_type='grpo'.",
            args.loss_type,
        )
    if args.delta is not None and args.delta <= 1 + clip_high:
        raise ArgumentError(
            f"delta={args.delta} must be above the clip's ceiling 1 + epsilon_high = {1 + clip_high}: it bounds the "
            "ratio where clipping does not."
        )
    scale = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)
    return GRPOSettings(
        loss_type=args.loss_type,
        importance_level=args.importance_sampling_level,
        clip_low=None if cispo else args.epsilon,
        clip_high=clip_high,
        delta=args.delta,
        scale_rewards=scale,
        aggregation=args.multi_objective_aggregation,
        reward_weights=online.reward_weights,
        beta=args.beta,
        kl_estimator=args.kl_estimator,
        bias_corrected_kl=args.use_bias_correction_kl,
        entropy_bonus=_resolve_entropy(args),
        top_entropy_quantile=args.top_entropy_quantile,
        mask_truncated=args.mask_truncated_completions,
        max_completion_length=args.max_completion_length,
        drop_equal_groups=args.dynamic_sampling_rounds > 0,
        score_old=reused,
        correction=resolve_correction(args),
    )


def resolve_rloo(args: Any, online: OnlineSettings) -> RLOOSettings:
    """RLOO's settings; an argument that the run leaves idle is an ArgumentError."""
    require_groups(args)
    reused = online.rollout.num_steps > 1
    refuse_idle(args, ("epsilon", "epsilon_high"), reused, ON_POLICY)
    clip, correction = args.reward_clip_range, resolve_correction(args)
    require(
        correction is None or correction.per_sequence,
        f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r} weighs tokens, and RLOO's ratio and loss are of "
        "whole completions; use sequence_mask or sequence_truncate.",
    )
    require(clip is None or (len(clip) == 2 and clip[0] < clip[1]), f"reward_clip_range={clip!r} must be (low, high).")
    return RLOOSettings(
        clip_low=args.epsilon,
        clip_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        beta=args.beta,
        kl_estimator=args.kl_estimator,
        normalize_advantages=args.normalize_advantages,
        reward_clip=tuple(clip) if clip else None,
        mask_truncated=args.mask_truncated_completions,
        drop_equal_groups=args.dynamic_sampling_rounds > 0,
        score_old=reused,
        correction=correction,
    )


def require_groups(args: Any) -> None:
    """ArgumentError unless a prompt has several completions."""
    require(
        args.num_generations >= 2,
        f"num_generations={args.num_generations!r} must be at least 2: a completion is compared with the others of its group.",
    )


ON_POLICY = (
    "each rollout serves one step, so the ratio is exactly 1 and nothing is clipped; raise num_iterations or "
    "steps_per_generation, or remove it"
)


def _refuse_idle_grpo(args: Any, cispo: bool, reused: bool, num_rewards: int) -> None:
    refuse_idle(args, ("epsilon", "delta"), not cispo, "CISPO has one bound, epsilon_high; remove it")
    if cispo:
        require(
            args.epsilon_high is not None,
            "loss_type='cispo' needs epsilon_high: the ratio's ceiling is 1 + epsilon_high (an offset as for every loss "
            "type, so TRL's epsilon_high=5.0 is 4.0 here).",
        )
        require(
            args.importance_sampling_level == "token",
            "loss_type='cispo' is per token; remove importance_sampling_level.",
        )
    refuse_idle(args, ("epsilon", "delta"), reused, ON_POLICY)
    refuse_idle(args, ("importance_sampling_level",), reused or _levels_differ(args), ON_POLICY)
    refuse_idle(args, ("epsilon_high",), reused or cispo, ON_POLICY)
    refuse_idle(
        args, ("use_bias_correction_kl",), args.beta != 0, "beta is 0, so there is no KL; set beta or remove it"
    )
    refuse_idle(
        args,
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        args.use_adaptive_entropy,
        "use_adaptive_entropy is off; set use_adaptive_entropy=True or remove it",
    )
    refuse_idle(
        args, ("multi_objective_aggregation",), num_rewards > 1, "there is one reward; pass several or remove it"
    )
    refuse_idle(
        args,
        ("scale_rewards",),
        args.multi_objective_aggregation == "sum_then_normalize",
        "normalize_then_sum normalises each reward within its group and the sum over the rollout; remove it",
    )


def _levels_differ(args: Any) -> bool:
    """Whether the ratio's unit matters where all ratios are 1: if a row's tokens have different factors.

    The factors are advantages under the top-entropy mask, weights of a correction per token, and a bias-corrected KL.
    """
    correction = resolve_correction(args)
    per_token = correction is not None and not correction.per_sequence
    return args.top_entropy_quantile < 1 or per_token or (args.beta != 0 and args.use_bias_correction_kl)


def _resolve_entropy(args: Any) -> EntropyBonus | None:
    if args.use_adaptive_entropy:
        low, high = args.entropy_coef_min, args.entropy_coef_max
        require(low <= args.entropy_coef <= high, f"entropy_coef={args.entropy_coef} must be in [{low}, {high}].")
        return EntropyBonus(args.entropy_coef, args.entropy_target, args.entropy_coef_delta, low, high)
    return EntropyBonus(args.entropy_coef) if args.entropy_coef else None


def _resolve_rollout(args: Any, world_size: int) -> RolloutSettings:
    batch, accumulation = args.per_device_train_batch_size * world_size, args.gradient_accumulation_steps
    per_generation = _steps_per_generation(args, batch)
    rows = batch * per_generation
    require(
        rows % args.num_generations == 0,
        f"a rollout holds per_device_train_batch_size x ranks x steps_per_generation = {args.per_device_train_batch_size} x "
        f"{world_size} x {per_generation} = {rows} completions, which num_generations={args.num_generations} does not divide.",
    )
    require(
        per_generation % accumulation == 0,
        f"steps_per_generation={per_generation} is not a multiple of gradient_accumulation_steps={accumulation}: a rollout "
        "serves whole steps.",
    )
    return RolloutSettings(
        num_prompts=rows // args.num_generations,
        num_generations=args.num_generations,
        rows_per_step=batch * accumulation,
        steps_per_pass=per_generation // accumulation,
        num_iterations=args.num_iterations,
        max_refills=args.dynamic_sampling_rounds,
    )


def _steps_per_generation(args: Any, batch: int) -> int:
    size = args.generation_batch_size
    if size is None:
        return args.steps_per_generation or args.gradient_accumulation_steps
    require(
        args.steps_per_generation is None,
        f"generation_batch_size={size} and {said_as(args, 'steps_per_generation')} say the same thing; give one.",
    )
    require(
        size > 0 and size % batch == 0,
        f"generation_batch_size={size} is not a multiple of per_device_train_batch_size x ranks = {batch}.",
    )
    return size // batch


def _resolve_sampling(args: Any) -> Sampling:
    more = dict(args.generation_kwargs or {})
    unknown = sorted(set(more) - set(EVERY_ENGINE))
    require(
        args.use_vllm or not unknown,
        f"generation_kwargs has {', '.join(unknown)}, which the native engine does not take; it takes {', '.join(EVERY_ENGINE)}.",
    )
    require(
        more.get("do_sample") in (None, True),
        f"generation_kwargs has do_sample={more.get('do_sample')!r}: greedy completions of a prompt are all the same, so "
        "there is nothing to compare; remove it (an evaluation is greedy, too).",
    )
    stop, stop_token_ids = _resolve_stops(more)
    return Sampling(
        num_generations=args.num_generations,
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_k=args.top_k or 0,
        top_p=args.top_p,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        stop=stop,
        stop_token_ids=stop_token_ids,
        seed=_seed(more.get("seed", args.seed)),
    )


def _seed(seed: Any) -> int:
    require(isinstance(seed, int), f"generation_kwargs has seed={seed!r}, which is no whole number.")
    return int(seed)


def _resolve_stops(more: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The texts and the token ids that end a completion."""
    stop, stop_ids = more.get("stop_strings") or more.get("stop") or (), more.get("stop_token_ids") or ()
    ends = more.get("eos_token_id")
    ends = ends if isinstance(ends, list | tuple) else [] if ends is None else [ends]
    strings = (stop,) if isinstance(stop, str) else stop
    require(
        _is_list(strings, lambda text: isinstance(text, str) and text),
        f"generation_kwargs has stop strings {stop!r}: they must be a string, or a list of strings, none of them empty.",
    )
    require(
        _is_list(stop_ids, lambda number: isinstance(number, int) and number >= 0),
        f"generation_kwargs has stop_token_ids={stop_ids!r}: it must be a list of token ids.",
    )
    require(
        _is_list(ends, lambda number: isinstance(number, int) and number >= 0),
        f"generation_kwargs has eos_token_id={more.get('eos_token_id')!r}: it must be a token id, or a list of token ids.",
    )
    return tuple(strings), (*stop_ids, *ends)


def _is_list(values: Any, fits: Callable[[Any], Any]) -> bool:
    """Whether it is a list or a tuple of what fits."""
    return isinstance(values, list | tuple) and all(map(fits, values))


def _resolve_weights(args: Any, num_rewards: int) -> tuple[float, ...]:
    if args.reward_weights is None:
        return (1.0,) * num_rewards
    require(
        isinstance(args.reward_weights, Sequence) and not isinstance(args.reward_weights, str),
        f"reward_weights={args.reward_weights!r} must be a list of numbers.",
    )
    require(
        len(args.reward_weights) == num_rewards,
        f"reward_weights has {len(args.reward_weights)} values for {num_rewards} rewards; give one for each.",
    )
    weights = tuple(float(weight) for weight in args.reward_weights)
    require(all(map(math.isfinite, weights)), f"reward_weights={args.reward_weights!r} must be finite numbers.")
    return weights

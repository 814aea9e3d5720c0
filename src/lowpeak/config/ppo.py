"""What PPO can be told: one frozen record, and how flat arguments become it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lowpeak.config.algorithm import Correction, KLEstimator
from lowpeak.config.correction import resolve_correction
from lowpeak.config.inapplicable import refuse_idle, require
from lowpeak.config.ranges import Range, one_of
from lowpeak.config.resolve import ON_POLICY, OnlineSettings

CriticLayout = Literal["head", "model", "adapter"]

RANGES: dict[str, Range] = {
    "critic": one_of(CriticLayout),
    "gamma": (lambda x: 0 <= x <= 1, "must be in [0, 1]"),
    "lam": (lambda x: 0 <= x <= 1, "must be in [0, 1]"),
    "vf_coef": (lambda x: 0 <= x < float("inf"), "must be a finite number of 0 or more"),
    "cliprange_value": (lambda x: x is None or x > 0, "must be above 0, or None"),
    "kl_target": (lambda x: x is None or x > 0, "must be above 0: nats per completion"),
    "kl_horizon": (lambda x: x >= 1, "must be at least 1 completion"),
    "early_stop_kl": (lambda x: x is None or x > 0, "must be above 0, or None"),
    "missing_eos_penalty": (lambda x: x is None or x >= 0, "must be 0 or more: it is taken off the reward"),
    "value_learning_rate": (lambda x: x is None or 0 <= x < float("inf"), "must be a finite number of 0 or more"),
    "value_warmup_steps": (lambda x: x >= 0, "must be 0 or more"),
}

REJECTED: dict[str, str] = {
    "total_episodes": "it counts completions: set max_steps, of which a rollout takes num_ppo_epochs x num_mini_batches",
    "response_length": "its name is max_completion_length; use that",
    "stop_token": "completions end at the tokenizer's end-of-sequence token; others are generation_kwargs={'stop_strings': ...}",
    "stop_token_id": "set generation_kwargs={'stop_token_ids': [...]}",
    "local_batch_size": "it is per_device_train_batch_size times steps_per_generation; set those",
    "local_mini_batch_size": "it follows from per_device_train_batch_size and gradient_accumulation_steps; set those",
    "micro_batch_size": "micro-batches are cut under a token budget; set micro_batch_tokens",
    "num_total_batches": "it counts rollouts: set max_steps, of which a rollout takes num_ppo_epochs x num_mini_batches",
    "world_size": "it is the number of processes that the launcher starts; remove it",
    "batch_size": "it follows from per_device_train_batch_size, gradient_accumulation_steps and num_mini_batches; set those",
    "mini_batch_size": "it follows from per_device_train_batch_size and gradient_accumulation_steps; set those",
    "exp_name": "name a run by output_dir and run_name",
    "local_rollout_forward_batch_size": "passes are cut under a token budget; set micro_batch_tokens",
    "num_sample_generations": "set eval_dataset and eval_steps, and log_completions",
    "sft_model_path": "it is the model itself; pass it as model",
    "reward_model_path": "pass it as reward_funcs (--reward on the command line)",
    "model_adapter_name": "an adapter is chosen by peft_config, or comes with the PeftModel that is passed as model; remove it",
    "ref_adapter_name": "under an adapter the reference is the policy without it, or as it came in; remove it",
}


@dataclass(frozen=True)
class AdaptiveKL:
    """The KL coefficient steered towards `target` nats per completion (Ziegler et al. 2019, section 2.2).

    A rollout of n completions multiplies it by `1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon`.
    """

    target: float
    horizon: int
    num_rows: int


@dataclass(frozen=True)
class PPOSettings:
    """PPO (arXiv 1707.06347) with a KL in the reward; see `algorithms/ppo.py`."""

    beta: float
    kl_estimator: KLEstimator
    adaptive_kl: AdaptiveKL | None
    gamma: float
    gae_lambda: float
    clip_low: float
    clip_high: float
    value_clip: float | None
    value_coef: float
    whiten_rewards: bool
    whiten_advantages: bool
    missing_eos_penalty: float
    early_stop_kl: float | None
    value_warmup_steps: int
    mask_truncated: bool
    score_old: bool
    correction: Correction | None = None

    @property
    def rollout_correction(self) -> Correction | None:
        """The correction of the engine's drift, fixed for the rollout: values are scored then anyway, and old with them."""
        return self.correction


def resolve_ppo(args: Any, online: OnlineSettings) -> PPOSettings:
    """PPO's settings; an argument that the run leaves idle is an ArgumentError."""
    _check_critic(args)
    still = "vf_coef is 0, so the critic's loss counts nothing; set vf_coef or remove it"
    refuse_idle(args, ("cliprange_value",), args.vf_coef > 0, still)
    refuse_idle(args, ("value_learning_rate",), args.vf_coef > 0 or args.weight_decay > 0, still)
    reused = online.rollout.num_steps > 1
    refuse_idle(args, ("epsilon", "epsilon_high", "cliprange_value", "early_stop_kl"), reused, ON_POLICY)
    refuse_idle(
        args, ("kl_target", "kl_horizon"), args.beta != 0, "beta is 0, so there is no KL; set beta or remove it"
    )
    refuse_idle(
        args, ("kl_horizon",), args.kl_target is not None, "the coefficient is fixed; set kl_target or remove it"
    )
    refuse_idle(
        args,
        ("dynamic_sampling_rounds",),
        False,
        "PPO learns from completions whose rewards are equal, too; remove it",
    )
    refuse_idle(
        args,
        ("missing_eos_penalty",),
        not online.mask_truncated,
        "mask_truncated_completions lets completions that did not end by themselves count no token; remove one of the two",
    )
    refuse_idle(
        args,
        ("value_model_path",),
        args.critic == "model",
        "the critic has no backbone of its own; set critic='model' or remove it",
    )
    correction = resolve_correction(args)
    return PPOSettings(
        beta=args.beta,
        kl_estimator=args.kl_estimator,
        adaptive_kl=_resolve_adaptive(args, online),
        gamma=args.gamma,
        gae_lambda=args.lam,
        clip_low=args.epsilon,
        clip_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        value_clip=args.cliprange_value,
        value_coef=args.vf_coef,
        whiten_rewards=args.whiten_rewards,
        whiten_advantages=args.whiten_advantages,
        missing_eos_penalty=args.missing_eos_penalty or 0.0,
        early_stop_kl=args.early_stop_kl,
        value_warmup_steps=args.value_warmup_steps,
        mask_truncated=online.mask_truncated,
        score_old=reused or args.beta != 0 or correction is not None,
        correction=correction,
    )


def _check_critic(args: Any) -> None:
    require(
        args.critic == "head" or args.cut.tensor == 1,
        f"critic={args.critic!r} does not run under tensor parallelism: set critic='head', or use ddp, fsdp2 or zero3.",
    )
    require(
        args.value_warmup_steps == 0 or (args.vf_coef > 0 and not 0 < args.max_steps <= args.value_warmup_steps),
        f"value_warmup_steps={args.value_warmup_steps} with vf_coef={args.vf_coef} and max_steps={args.max_steps}: in these steps "
        "the critic alone is trained, so vf_coef must be above 0 and max_steps above them.",
    )
    require(
        args.value_warmup_steps == 0 or args.weight_decay == 0,
        f"value_warmup_steps={args.value_warmup_steps} holds the policy still, and weight_decay={args.weight_decay} would shrink "
        "it meanwhile; leave one of the two out.",
    )


def _resolve_adaptive(args: Any, online: OnlineSettings) -> AdaptiveKL | None:
    if args.kl_target is None:
        return None
    return AdaptiveKL(args.kl_target, args.kl_horizon, online.rollout.num_rows)

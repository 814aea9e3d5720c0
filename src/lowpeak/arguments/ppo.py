"""PPO (arXiv 1707.06347) with a KL in the reward (arXiv 1909.08593): arguments, and what its loss is made of.

Names are those of TRL's former PPO trainer where the meaning is the same; `docs/migrating.md` has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lowpeak.arguments.declare import (
    FINITE,
    NOT_NEGATIVE,
    ActsWhen,
    Check,
    above_zero,
    argument,
    at_least,
    fill,
    in_model,
    in_rewards,
    in_training,
    never,
    one_of,
    redeclared,
    require,
    within,
)
from lowpeak.arguments.online import (
    HAS_KL,
    REUSES_ROLLOUTS,
    Correction,
    KLEstimator,
    OnlineArguments,
    OnlineSettings,
    clip_high,
    resolve_correction,
)
from lowpeak.arguments.rloo import KL_IN_REWARD

CriticLayout = Literal["head", "model", "adapter"]

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

_STILL = "vf_coef is 0, so the critic's loss counts nothing; set vf_coef or remove it"
_TRAINS_VALUES = ActsWhen(lambda args, facts: args.vf_coef > 0, _STILL)


@dataclass(repr=False)
class PPOArguments(OnlineArguments):
    """What PPO takes."""

    rejected: ClassVar[Mapping[str, str]] = REJECTED
    never_act: ClassVar[Mapping[str, ActsWhen]] = {
        "dynamic_sampling_rounds": never(
            "PPO learns from completions whose rewards are equal, too; remove it", raises=True
        )
    }

    num_generations: int = redeclared(OnlineArguments, "num_generations", 1)
    beta: float = redeclared(OnlineArguments, "beta", 0.05, help=KL_IN_REWARD)
    kl_estimator: str = redeclared(OnlineArguments, "kl_estimator", "k1")
    num_iterations: int = redeclared(
        OnlineArguments, "num_iterations", 4, help="Passes over each rollout (PPO's epochs)."
    )
    kl_coef: float | None = argument(None, "TRL's name of beta.", means="beta")
    num_ppo_epochs: int | None = argument(None, "TRL's name of num_iterations.", means="num_iterations")
    cliprange: float | None = argument(None, "TRL's name of epsilon.", means="epsilon")
    num_mini_batches: int | None = argument(
        None,
        "Steps of one pass: steps_per_generation over gradient_accumulation_steps, said TRL's way.",
        Check(lambda x: x is None or (type(x) is int and x >= 1), "must be a whole number of at least 1"),
    )
    kl_target: float | None = argument(
        None,
        "Steer beta so that the KL comes to so many nats per completion (None: beta is fixed).",
        Check(lambda x: x is None or x > 0, "must be above 0: nats per completion"),
        HAS_KL,
    )
    kl_horizon: int = argument(
        10000,
        "Completions over which that steering acts.",
        at_least(1, "completion"),
        (
            HAS_KL,
            ActsWhen(
                lambda args, facts: args.kl_target is not None, "the coefficient is fixed; set kl_target or remove it"
            ),
        ),
    )
    early_stop_kl: float | None = argument(
        None,
        "Leave a rollout's other steps out once half the mean squared log-ratio is above this.",
        above_zero(),
        REUSES_ROLLOUTS,
    )
    gamma: float = argument(1.0, "Discount of later rewards, per token.", within(0, 1))
    lam: float = argument(0.95, "GAE's lambda.", within(0, 1))
    whiten_rewards: bool = argument(False, "Scale the rewards of tokens to unit variance in the rollout.")
    whiten_advantages: bool = argument(True, "Centre and scale the advantages of tokens over the rollout.")
    missing_eos_penalty: float | None = in_rewards(
        None,
        "Taken off the reward of a completion that did not end by itself.",
        Check(lambda x: x is None or x >= 0, "must be 0 or more: it is taken off the reward"),
        ActsWhen(
            lambda args, facts: not args.mask_truncated_completions,
            "mask_truncated_completions leaves completions that did not end by themselves out of the loss; remove one of the two",
            raises=True,
        ),
    )
    critic: str = in_model(
        "head",
        "Where values come from: head (on the policy's backbone), adapter (a second LoRA adapter on the base), or model "
        "(a backbone of its own).",
        one_of(CriticLayout),
    )
    value_model_path: str | None = in_model(
        None,
        "With critic=model: a reward model's checkpoint that starts it (None: the policy's weights).",
        acts=ActsWhen(
            lambda args, facts: args.critic == "model",
            "the critic has no backbone of its own; set critic='model' or remove it",
            raises=True,
        ),
    )
    value_learning_rate: float | None = in_training(
        None,
        "The critic's learning rate (None: learning_rate).",
        FINITE,
        ActsWhen(lambda args, facts: args.vf_coef > 0 or args.weight_decay > 0, _STILL),
    )
    value_warmup_steps: int = argument(0, "Steps in which the critic alone is trained, at the start.", NOT_NEGATIVE)
    vf_coef: float = argument(0.1, "Weight of the value loss.", FINITE)
    cliprange_value: float | None = argument(
        0.2,
        "How far a value may move from the rollout's before its loss is clipped (None: no clip).",
        above_zero(),
        (_TRAINS_VALUES, REUSES_ROLLOUTS),
    )


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
    """Return PPO's settings; ArgumentError for a critic that could not be trained as asked."""
    _check_critic(args)
    correction = resolve_correction(args)
    steered = args.kl_target is not None
    return fill(
        PPOSettings,
        args,
        adaptive_kl=AdaptiveKL(args.kl_target, args.kl_horizon, online.rollout.num_rows) if steered else None,
        gae_lambda=args.lam,
        clip_low=args.epsilon,
        clip_high=clip_high(args),
        value_clip=args.cliprange_value,
        value_coef=args.vf_coef,
        missing_eos_penalty=args.missing_eos_penalty or 0.0,
        mask_truncated=online.mask_truncated,
        score_old=online.rollout.num_steps > 1 or args.beta != 0 or correction is not None,
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

"""PPO (arXiv 1707.06347) with a KL in the reward (arXiv 1909.08593): arguments and settings.

Arguments have the names of TRL's former PPO trainer if they have the same meaning; see `docs/migrating.md` for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lowpeak.arguments.base import ModelSettings, resolve_model
from lowpeak.arguments.correction import Correction, OldPolicy, resolve_correction, resolve_old_policy
from lowpeak.arguments.declare import (
    FINITE,
    NOT_NEGATIVE,
    Check,
    EffectCondition,
    above_zero,
    argument,
    at_least,
    make_settings,
    model_argument,
    never,
    one_of,
    redeclared,
    require,
    reward_argument,
    training_argument,
    within,
)
from lowpeak.arguments.online import (
    HAS_KL,
    REUSES_ROLLOUTS,
    KLEstimator,
    OnlineArguments,
    OnlineSettings,
    clip_high,
)
from lowpeak.arguments.rloo import KL_IN_REWARD

CriticKind = Literal["head", "model", "adapter"]

REJECTED: dict[str, str] = {
    "response_length": "use max_completion_length",
    "stop_token": "completions end at the end-of-sequence token; for others set generation_kwargs={'stop_strings': ...}",
    "stop_token_id": "set generation_kwargs={'stop_token_ids': [...]}",
    "batch_size": "it follows from per_device_train_batch_size, gradient_accumulation_steps and num_mini_batches; set those",
    "mini_batch_size": "it follows from per_device_train_batch_size and gradient_accumulation_steps; set those",
    "exp_name": "set output_dir and run_name",
    "local_rollout_forward_batch_size": "passes run under a token budget; set micro_batch_tokens",
    "num_sample_generations": "set eval_dataset and eval_steps, and log_completions",
    "model_adapter_name": "pass peft_config, or a PeftModel as model; remove it",
    "ref_adapter_name": "with an adapter the reference is the policy without it, or its initial copy; remove it",
}

_COUNT = Check(lambda x: x is None or (type(x) is int and x >= 1), "must be an integer of at least 1")
_NO_VALUE_LOSS = "vf_coef is 0, so the value loss has no weight; set vf_coef or remove it"
_TRAINS_VALUES = EffectCondition(lambda args, facts: args.vf_coef > 0, _NO_VALUE_LOSS)


@dataclass(repr=False)
class PPOArguments(OnlineArguments):
    """Arguments of PPO."""

    rejected: ClassVar[Mapping[str, str]] = REJECTED
    never_act: ClassVar[Mapping[str, EffectCondition]] = {
        "dynamic_sampling_rounds": never("PPO also learns from groups with equal rewards; remove it", raises=True)
    }

    num_generations: int = redeclared(OnlineArguments, "num_generations", 1)
    beta: float = redeclared(OnlineArguments, "beta", 0.05, help=KL_IN_REWARD)
    kl_estimator: str = redeclared(OnlineArguments, "kl_estimator", "k1")
    num_iterations: int = redeclared(
        OnlineArguments, "num_iterations", 4, help="Passes over each rollout (PPO epochs)."
    )
    kl_coef: float | None = argument(None, "TRL's name of beta.", alias_of="beta")
    num_ppo_epochs: int | None = argument(None, "TRL's name of num_iterations.", alias_of="num_iterations")
    cliprange: float | None = argument(None, "TRL's name of epsilon.", alias_of="epsilon")
    num_mini_batches: int | None = argument(
        None, "Steps per pass (TRL's name): sets steps_per_generation to this x gradient_accumulation_steps.", _COUNT
    )
    total_episodes: int | None = argument(None, "Completions of the run (TRL's name): sets max_steps.", _COUNT)
    sft_model_path: str | None = model_argument(None, "TRL's name of the model.")
    reward_model_path: str | None = reward_argument(None, "TRL's name of the reward model.")
    kl_target: float | None = argument(
        None,
        "Adapt beta so that the KL approaches this many nats per completion (None: beta is fixed).",
        Check(lambda x: x is None or x > 0, "must be above 0: nats per completion"),
        HAS_KL,
    )
    kl_horizon: int = argument(
        10000,
        "Completions over which beta adapts (larger is slower).",
        at_least(1, "completion"),
        (
            HAS_KL,
            EffectCondition(
                lambda args, facts: args.kl_target is not None, "beta is fixed; set kl_target or remove it"
            ),
        ),
    )
    early_stop_kl: float | None = argument(
        None,
        "Skip the remaining steps of a rollout once half the mean squared log-ratio is above this (None: off).",
        above_zero(),
        REUSES_ROLLOUTS,
    )
    gamma: float = argument(1.0, "Discount factor per token.", within(0, 1))
    lam: float = argument(0.95, "Lambda of GAE.", within(0, 1))
    whiten_rewards: bool = argument(False, "Scale token rewards to unit variance over the rollout.")
    whiten_advantages: bool = argument(True, "Normalise token advantages to mean 0 and variance 1 over the rollout.")
    missing_eos_penalty: float | None = reward_argument(
        None,
        "Subtracted from the reward of a truncated completion (None: 0).",
        Check(lambda x: x is None or x >= 0, "must be 0 or more: it is subtracted from the reward"),
        EffectCondition(
            lambda args, facts: not args.mask_truncated_completions,
            "mask_truncated_completions excludes truncated completions from the loss; remove one of the two",
            raises=True,
        ),
    )
    critic: str = model_argument(
        "head",
        "Critic: head (on the policy's backbone), adapter (a second LoRA adapter on the base model), or model (a separate "
        "backbone).",
        one_of(CriticKind),
    )
    value_model_path: str | None = model_argument(
        None,
        "With critic=model: a reward model's checkpoint to initialise it (None: the policy's weights).",
        acts_if=EffectCondition(
            lambda args, facts: args.critic == "model",
            "the critic has no separate backbone; set critic='model' or remove it",
            raises=True,
        ),
    )
    value_learning_rate: float | None = training_argument(
        None,
        "Learning rate of the critic (None: learning_rate).",
        FINITE,
        EffectCondition(lambda args, facts: args.vf_coef > 0 or args.weight_decay > 0, _NO_VALUE_LOSS),
    )
    value_warmup_steps: int = argument(0, "Number of first steps in which only the critic is trained.", NOT_NEGATIVE)
    vf_coef: float = argument(0.1, "Weight of the value loss.", FINITE)
    cliprange_value: float | None = argument(
        0.2,
        "Clip range of a value around the rollout's value (None: no clip).",
        above_zero(),
        (_TRAINS_VALUES, REUSES_ROLLOUTS),
    )


@dataclass(frozen=True)
class AdaptiveKL:
    """Adaptive KL coefficient with a target in nats per completion (Ziegler et al. 2019, section 2.2).

    A rollout of n completions multiplies the coefficient by `1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon`.
    """

    target: float
    horizon: int
    num_sequences: int


@dataclass(frozen=True)
class PPOSettings:
    """Settings of PPO (arXiv 1707.06347) with a KL in the reward; see `algorithms/ppo.py`."""

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
    score_old: bool
    correction: Correction | None = None
    old_policy: OldPolicy = "policy"

    @property
    def rollout_correction(self) -> Correction | None:
        """The correction of the engine's drift, fixed for the rollout."""
        # The values are scored before the first step in any case, and old log-probs with them.
        return self.correction


@dataclass(frozen=True)
class CriticSettings:
    """The critic's layout, the checkpoint of a separate one, its learning rate (None: the policy's), and how models load."""

    critic: CriticKind
    value_model_path: str | None
    value_learning_rate: float | None
    model: ModelSettings


def resolve_critic(args: Any) -> CriticSettings:
    """Return the critic's settings."""
    return make_settings(CriticSettings, args, model=resolve_model(args))


def resolve_ppo(args: Any, online: OnlineSettings) -> PPOSettings:
    """Return PPO's settings; ArgumentError for a critic that cannot be trained as requested."""
    _check_critic(args)
    correction, old_policy = resolve_correction(args), resolve_old_policy(args)
    reuses_old = online.rollout.num_steps > 1 and old_policy == "policy"
    is_adaptive = args.kl_target is not None
    return make_settings(
        PPOSettings,
        args,
        adaptive_kl=AdaptiveKL(args.kl_target, args.kl_horizon, online.rollout.num_sequences) if is_adaptive else None,
        gae_lambda=args.lam,
        clip_low=args.epsilon,
        clip_high=clip_high(args),
        value_clip=args.cliprange_value,
        value_coef=args.vf_coef,
        missing_eos_penalty=args.missing_eos_penalty or 0.0,
        score_old=reuses_old or args.beta != 0 or correction is not None,
        correction=correction,
        old_policy=old_policy,
    )


def _check_critic(args: Any) -> None:
    require(
        args.critic == "head" or args.model_parallel.tensor == 1,
        f"critic={args.critic!r} is not supported with tensor parallelism: set critic='head', or use ddp, fsdp2 or zero3.",
    )
    require(
        args.value_warmup_steps == 0 or (args.vf_coef > 0 and not 0 < args.max_steps <= args.value_warmup_steps),
        f"value_warmup_steps={args.value_warmup_steps} with vf_coef={args.vf_coef} and max_steps={args.max_steps}: in these steps "
        "only the critic is trained, so vf_coef must be above 0 and max_steps above value_warmup_steps.",
    )
    require(
        args.value_warmup_steps == 0 or args.weight_decay == 0,
        f"value_warmup_steps={args.value_warmup_steps} freezes the policy, but weight_decay={args.weight_decay} would shrink its "
        "weights; remove one of the two.",
    )

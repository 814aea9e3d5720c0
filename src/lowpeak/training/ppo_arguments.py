"""PPOConfig. Names are those of TRL's former PPO trainer where the meaning is the same; `docs/migrating.md` has the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lowpeak.config.inapplicable import require
from lowpeak.config.ppo import RANGES, REJECTED
from lowpeak.config.ranges import Range
from lowpeak.training.arguments import OnlineConfig
from lowpeak.training.fields import argument, refuses_unknown


@refuses_unknown
@dataclass(repr=False)
class PPOConfig(OnlineConfig):
    """Arguments of PPO (arXiv 1707.06347) with a KL in the reward (arXiv 1909.08593)."""

    ranges: ClassVar[Mapping[str, Range]] = RANGES
    rejected: ClassVar[Mapping[str, str]] = REJECTED
    other_names: ClassVar[Mapping[str, str]] = {
        **OnlineConfig.other_names,
        "kl_coef": "beta",
        "num_ppo_epochs": "num_iterations",
        "cliprange": "epsilon",
    }

    num_generations: int = argument(1, "generation", "Completions of each prompt (G).")
    beta: float = argument(0.05, "algorithm", "Weight of the KL in the reward; 0 loads no reference model.")
    kl_estimator: str = argument("k1", "algorithm", "KL estimate per token: k1, k2 or k3.")
    num_iterations: int = argument(4, "algorithm", "Passes over each rollout (PPO's epochs).")
    kl_coef: float | None = argument(None, "algorithm", "TRL's name of beta.")
    num_ppo_epochs: int | None = argument(None, "algorithm", "TRL's name of num_iterations.")
    cliprange: float | None = argument(None, "algorithm", "TRL's name of epsilon.")
    num_mini_batches: int | None = argument(
        None, "algorithm", "Steps of one pass: steps_per_generation over gradient_accumulation_steps, said TRL's way."
    )
    kl_target: float | None = argument(
        None, "algorithm", "Steer beta so that the KL comes to so many nats per completion (None: beta is fixed)."
    )
    kl_horizon: int = argument(10000, "algorithm", "Completions over which that steering acts.")
    early_stop_kl: float | None = argument(
        None, "algorithm", "Leave a rollout's other steps out once half the mean squared log-ratio is above this."
    )
    gamma: float = argument(1.0, "algorithm", "Discount of later rewards, per token.")
    lam: float = argument(0.95, "algorithm", "GAE's lambda.")
    whiten_rewards: bool = argument(False, "algorithm", "Scale the rewards of tokens to unit variance in the rollout.")
    whiten_advantages: bool = argument(True, "algorithm", "Centre and scale the advantages of tokens over the rollout.")
    missing_eos_penalty: float | None = argument(
        None, "rewards", "Taken off the reward of a completion that did not end by itself."
    )
    critic: str = argument(
        "head",
        "model",
        "Where values come from: head (on the policy's backbone), adapter (a second LoRA adapter on the base), or model "
        "(a backbone of its own).",
    )
    value_model_path: str | None = argument(
        None, "model", "With critic=model: a reward model's checkpoint that starts it (None: the policy's weights)."
    )
    value_learning_rate: float | None = argument(None, "training", "The critic's learning rate (None: learning_rate).")
    value_warmup_steps: int = argument(0, "algorithm", "Steps in which the critic alone is trained, at the start.")
    vf_coef: float = argument(0.1, "algorithm", "Weight of the value loss.")
    cliprange_value: float | None = argument(
        0.2, "algorithm", "How far a value may move from the rollout's before its loss is clipped (None: no clip)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_mini_batches is not None:
            require(
                type(self.num_mini_batches) is int and self.num_mini_batches >= 1,
                f"num_mini_batches={self.num_mini_batches!r} must be a whole number of at least 1.",
            )
            steps = self.num_mini_batches * self.gradient_accumulation_steps
            self._set_by("num_mini_batches", "steps_per_generation", steps)
        zero = getattr(self, "deepspeed_plugin", None)
        require(
            self.value_learning_rate is None or zero is None or "optimizer" not in zero.hf_ds_config.config,
            f"value_learning_rate={self.value_learning_rate} needs an optimizer of torch's, and the DeepSpeed config has a section "
            "for its own: take the section out (optim and learning_rate say the same), or leave value_learning_rate out.",
        )

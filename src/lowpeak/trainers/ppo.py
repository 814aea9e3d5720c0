"""PPO (Schulman et al. 2017, arXiv 1707.06347): a critic predicts the reward of a completion at each token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from lowpeak.algorithms import Algorithm, make_ppo
from lowpeak.arguments import OnlineConfig, OnlineSettings, PPOConfig, resolve_ppo
from lowpeak.errors import ArgumentError
from lowpeak.rewards import as_list
from lowpeak.trainers.constructor import check_kinds
from lowpeak.trainers.online import OnlineTrainer
from lowpeak.trainers.ppo_critic import (
    EXPORT_FOLDER,
    attach_critic,
    check_critic_is_optimized,
    critic_parameters,
    export_critic,
    set_critic_learning_rate,
)
from lowpeak.training import CRITIC_FOLDER


class PPOTrainer(OnlineTrainer):
    """Proximal policy optimisation, with a critic on the policy's backbone, in an adapter, or in a separate model.

    from lowpeak import PPOConfig, PPOTrainer

    trainer = PPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=reward, args=PPOConfig(output_dir="out"), train_dataset=data
    )
    trainer.train()

    `value_model` is a classifier with one label that starts the critic (critic="model"); `reward_model` joins `reward_funcs`.
    `others` and `named` are OnlineTrainer's.
    """

    config_class: ClassVar[type[OnlineConfig]] = PPOConfig

    @staticmethod
    def make_algorithm(args: Any, settings: OnlineSettings) -> Algorithm:
        return make_ppo(resolve_ppo(args, settings))

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        *others: Any,
        value_model: Any = None,
        reward_model: Any = None,
        **named: Any,
    ) -> None:
        check_kinds(value_model=value_model)
        self.value_model = value_model
        super().__init__(model, [*as_list(reward_funcs), *as_list(reward_model)], *others, **named)
        self.value_model = None
        if self.optimizer is not None:
            self._check_optimizer(self.optimizer)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.acting_args.value_learning_rate is not None:
            raise ArgumentError(
                "value_learning_rate has no effect on an optimizer that is passed in: give the critic a separate group in it."
            )
        check_critic_is_optimized(optimizer, self.model)

    def attach_extra_modules(self, policy: nn.Module, origin: Any, args: Any) -> None:
        attach_critic(policy, origin, self.value_model, args)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        rate = self.acting_args.value_learning_rate
        if rate is not None:
            set_critic_learning_rate(optimizer, self.model, rate)
        return optimizer

    def extra_weights(self, with_states: bool) -> dict[str, Mapping[str, nn.Parameter]]:
        critic = {} if with_states else {CRITIC_FOLDER: critic_parameters(self.model)}
        return {**super().extra_weights(with_states), **critic}

    def load_best(self, best: Path) -> None:
        super().load_best(best)
        self.load_extra_weights(best)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the policy, and a critic that is a separate model into the folder `critic` in it."""
        export_critic(self, Path(output_dir or self.args.output_dir) / EXPORT_FOLDER)
        super().save_model(output_dir, _internal_call)

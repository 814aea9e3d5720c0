"""PPO (Schulman et al. 2017, arXiv 1707.06347): a critic predicts the reward of a completion at each token.

The critic is attached before the policy is prepared, trained at a separate rate, saved and resumed with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from lowpeak.algorithms import Algorithm, make_ppo
from lowpeak.arguments import OnlineSettings, resolve_critic, resolve_ppo
from lowpeak.checkpoint import stage_files, write_configs, write_weights
from lowpeak.errors import ArgumentError
from lowpeak.heads import SeparateCritic, belongs_to_critic, causal_lm, critic_of
from lowpeak.records import SLICE_BYTES
from lowpeak.rewards import as_list
from lowpeak.setup import attach_critic
from lowpeak.trainers.configs import OnlineConfig, PPOConfig
from lowpeak.trainers.constructor import check_kinds, passed_or_named
from lowpeak.trainers.online import OnlineTrainer
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
        model: Any = None,
        reward_funcs: Any = None,
        args: Any = None,
        *others: Any,
        value_model: Any = None,
        reward_model: Any = None,
        **named: Any,
    ) -> None:
        check_kinds(value_model=value_model)
        self.value_model = value_model
        (model,) = passed_or_named([model] if model is not None else [], args, "sft_model_path") or (None,)
        rewards = passed_or_named([*as_list(reward_funcs), *as_list(reward_model)], args, "reward_model_path")
        super().__init__(model, rewards, args, *others, **named)
        self.value_model = None
        if self.optimizer is not None:
            self._check_optimizer(self.optimizer)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.critic_settings.value_learning_rate is not None:
            raise ArgumentError(
                "value_learning_rate has no effect on an optimizer that is passed in: give the critic a separate group in it."
            )
        check_critic_is_optimized(optimizer, self.model)

    def attach_extra_modules(self, policy: nn.Module, origin: Any, args: Any) -> None:
        self.critic_settings = resolve_critic(args)
        if self.value_model is not None and "critic" not in getattr(args, "given", ()):
            self.critic_settings = replace(self.critic_settings, critic="model")
        attach_critic(policy, origin, self.value_model, self.critic_settings)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        rate = self.critic_settings.value_learning_rate
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
        """Write the policy, and a separate critic model into its folder `critic`."""
        export_critic(self, Path(output_dir or self.args.output_dir) / CRITIC_FOLDER)
        super().save_model(output_dir, _internal_call)


# in the optimizer


def set_critic_learning_rate(optimizer: torch.optim.Optimizer, model: nn.Module, learning_rate: float) -> None:
    """Move the critic's parameters into separate groups, which differ only by the learning rate."""
    critic_ids = {id(parameter) for name, parameter in model.named_parameters() if belongs_to_critic(name)}
    for group in list(optimizer.param_groups):
        critic = [parameter for parameter in group["params"] if id(parameter) in critic_ids]
        if not critic:
            continue
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in critic_ids]
        options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
        optimizer.add_param_group({**options, "params": critic, "lr": learning_rate})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def check_critic_is_optimized(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ArgumentError if an optimizer that was passed in has no parameter of the critic."""
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in optimized for parameter in critic_parameters(model).values()):
        raise ArgumentError(
            "the optimizer that was passed in has no parameter of the critic, which would never learn: leave it out and choose "
            "optim, learning_rate and value_learning_rate, or pass value_model with critic='model' and its parameters in it, too."
        )


# on disk


def critic_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the critic's parameters by their names in the policy."""
    return {name: parameter for name, parameter in model.named_parameters() if belongs_to_critic(name)}


def export_critic(trainer: Any, folder: Path) -> None:
    """Write a critic that is a separate model as a sequence classifier, slice by slice.

    Other critics depend on the policy that they were trained with, and are only in checkpoints.
    """
    strategy, tokenizer = trainer.run.strategy, trainer.processing_class
    critic = critic_of(causal_lm(trainer.accelerator.unwrap_model(trainer.model)))
    if not isinstance(critic, SeparateCritic):
        return
    classifier, first = critic.classifier, strategy.ranks.processes.rank == 0
    layout = strategy.layout(classifier)
    with stage_files(folder, strategy.ranks.processes) as stage:
        with strategy.ranks.propagate_errors():
            if first:
                write_configs(stage, classifier, layout)
                if tokenizer is not None:
                    tokenizer.save_pretrained(stage)
        slices = strategy.slices(classifier, SLICE_BYTES, None)
        write_weights(stage if first else None, classifier, layout, slices)

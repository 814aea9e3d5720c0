"""GRPO and its family (DeepSeekMath, arXiv 2402.03300): advantages from the rewards of a prompt's own completions."""

from __future__ import annotations

from typing import Any, ClassVar

from lowpeak.algorithms import Algorithm, make_grpo
from lowpeak.arguments import OnlineSettings, resolve_grpo
from lowpeak.trainers.configs import GRPOConfig, OnlineConfig
from lowpeak.trainers.online import OnlineTrainer


class GRPOTrainer(OnlineTrainer):
    """Group relative policy optimisation.

    from lowpeak import GRPOConfig, GRPOTrainer

    def reward(completions, **columns):
        return [float(len(set(text))) for text in completions]

    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=reward, args=GRPOConfig(output_dir="out"), train_dataset=data
    )
    trainer.train()
    """

    config_class: ClassVar[type[OnlineConfig]] = GRPOConfig

    @staticmethod
    def make_algorithm(args: Any, settings: OnlineSettings) -> Algorithm:
        return make_grpo(resolve_grpo(args, settings))

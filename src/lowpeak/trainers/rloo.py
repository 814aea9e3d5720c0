"""RLOO (Ahmadian et al. 2024, arXiv 2402.14740): REINFORCE with the other completions' mean reward as the baseline."""

from __future__ import annotations

from typing import Any, ClassVar

from lowpeak.algorithms import Algorithm, make_rloo
from lowpeak.arguments import OnlineSettings, resolve_rloo
from lowpeak.trainers.configs import OnlineConfig, RLOOConfig
from lowpeak.trainers.online import OnlineTrainer


class RLOOTrainer(OnlineTrainer):
    """REINFORCE leave-one-out, with the KL in the reward and one ratio per sequence.

    from lowpeak import RLOOConfig, RLOOTrainer

    trainer = RLOOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=reward, args=RLOOConfig(output_dir="out"), train_dataset=data
    )
    trainer.train()
    """

    config_class: ClassVar[type[OnlineConfig]] = RLOOConfig

    @staticmethod
    def make_algorithm(args: Any, settings: OnlineSettings) -> Algorithm:
        return make_rloo(resolve_rloo(args, settings))

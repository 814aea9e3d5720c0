"""Online DPO (Guo et al. 2024, arXiv 2402.04792): DPO on pairs of the policy's own new completions."""

from __future__ import annotations

from typing import Any, ClassVar

from lowpeak.algorithms import Algorithm, make_online_dpo
from lowpeak.arguments import OnlineSettings, check_betas, resolve_online_dpo
from lowpeak.errors import ArgumentError
from lowpeak.rewards import as_list, resolve_reward_funcs
from lowpeak.trainers.configs import OnlineConfig, OnlineDPOConfig
from lowpeak.trainers.constructor import passed_or_named
from lowpeak.trainers.online import OnlineTrainer


class OnlineDPOTrainer(OnlineTrainer):
    """Direct preference optimisation on the best and the worst completion of each prompt, by rewards or by a judge.

    from lowpeak import OnlineDPOConfig, OnlineDPOTrainer

    trainer = OnlineDPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct", judge=judge, args=OnlineDPOConfig(output_dir="out"), train_dataset=data
    )
    trainer.train()

    The reference is `ref_model`, or the untrained model, or the policy with its adapter off. Positional arguments are
    TRL's; `others` are OnlineTrainer's.
    """

    config_class: ClassVar[type[OnlineConfig]] = OnlineDPOConfig

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        reward_funcs: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        *,
        judge: Any = None,
        **others: Any,
    ) -> None:
        if judge is not None and getattr(args, "num_generations_eval", None) == 1:
            raise ArgumentError(
                "num_generations_eval=1 leaves the judge no pair to compare in an evaluation: set it to 2 or more, or remove it."
            )
        super().__init__(
            model,
            resolve_reward_funcs(passed_or_named(as_list(reward_funcs), args, "reward_model_path"), judge),
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            peft_config=peft_config,
            ref_model=ref_model,
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            **others,
        )
        check_betas(self.acting_args, self.num_steps_per_epoch())

    @staticmethod
    def make_algorithm(args: Any, settings: OnlineSettings) -> Algorithm:
        return make_online_dpo(resolve_online_dpo(args, settings))

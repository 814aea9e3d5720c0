"""Distillation from a teacher on the policy's own completions (GKD, arXiv 2306.13649)."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from lowpeak.algorithms import Algorithm, make_distillation
from lowpeak.arguments import OnlineSettings, resolve_distillation
from lowpeak.errors import ArgumentError
from lowpeak.trainers.configs import DistillationConfig, OnlineConfig
from lowpeak.trainers.constructor import check_kinds
from lowpeak.trainers.online import OnlineTrainer


class DistillationTrainer(OnlineTrainer):
    """On-policy distillation: the divergence from a teacher's distributions at each token of a completion.

    from lowpeak import DistillationConfig, DistillationTrainer

    trainer = DistillationTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct", teacher_model="Qwen/Qwen2.5-7B-Instruct",
        args=DistillationConfig(output_dir="out"), train_dataset=data,
    )
    trainer.train()

    teacher_model   name, path or instance of a causal language model with the policy's tokenizer; None: the policy itself by
                    `teacher_model_kind`, or with an adapter the base without it

    Positional arguments are TRL's; `others` are OnlineTrainer's. `reward_funcs` are measured, and train the policy only with a
    `distillation_weight` below 1.
    """

    config_class: ClassVar[type[OnlineConfig]] = DistillationConfig

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        *,
        reward_funcs: Any = None,
        ref_model: Any = None,
        **others: Any,
    ) -> None:
        if ref_model is not None:
            raise ArgumentError(
                "ref_model has no effect, since distillation has no KL to a reference: pass teacher_model."
            )
        check_kinds(teacher_model=teacher_model)
        if isinstance(teacher_model, os.PathLike):
            teacher_model = os.fspath(teacher_model)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            ref_model=teacher_model,
            **others,
        )
        self.teacher_model = self.ref_model

    @staticmethod
    def make_algorithm(args: Any, settings: OnlineSettings) -> Algorithm:
        return make_distillation(resolve_distillation(args, settings))

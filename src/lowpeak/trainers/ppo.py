"""PPO (Schulman et al. 2017, arXiv 1707.06347): a critic predicts the reward of a completion at each token.

The critic is attached before the policy is prepared, trained at a separate rate, saved and resumed with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

from lowpeak.algorithms import Algorithm, make_ppo
from lowpeak.arguments import CriticSettings, OnlineSettings, resolve_critic, resolve_ppo
from lowpeak.checkpoint import stage_files, write_configs, write_weights
from lowpeak.errors import ArgumentError
from lowpeak.heads import (
    CRITIC,
    AdapterCritic,
    SeparateCritic,
    SharedCritic,
    ValueHead,
    add_critic,
    belongs_to_critic,
    causal_lm,
    critic_of,
    install_adapter_switches,
    is_peft,
    keep_critic_trainable,
)
from lowpeak.models import from_pretrained, gather_zero3_params, init_without_weights
from lowpeak.parallel import decoder_layers, exported_parameters, shard_like
from lowpeak.records import SLICE_BYTES
from lowpeak.rewards import as_list, load_classifier
from lowpeak.trainers.configs import OnlineConfig, PPOConfig
from lowpeak.trainers.constructor import check_kinds
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
        if self.critic_settings.value_learning_rate is not None:
            raise ArgumentError(
                "value_learning_rate has no effect on an optimizer that is passed in: give the critic a separate group in it."
            )
        check_critic_is_optimized(optimizer, self.model)

    def attach_extra_modules(self, policy: nn.Module, origin: Any, args: Any) -> None:
        self.critic_settings = resolve_critic(args)
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
        """Write the policy, and a critic that is a separate model into the folder `critic` in it."""
        export_critic(self, Path(output_dir or self.args.output_dir) / CRITIC_FOLDER)
        super().save_model(output_dir, _internal_call)


def attach_critic(policy: nn.Module, origin: Any, value_model: Any, settings: CriticSettings) -> None:
    """Attach the critic that the settings describe; `origin` is the user's argument `model`.

    Raises ArgumentError for a layout that the policy cannot have, and for a value model that is not a classifier with
    one label.
    """
    causal = causal_lm(policy)
    if value_model is not None and settings.critic != "model":
        raise ArgumentError(
            f"value_model has no effect with critic={settings.critic!r}: set critic='model', or remove it."
        )
    critic: nn.Module
    if settings.critic == "model":
        critic = SeparateCritic(_classifier(policy, causal, origin, value_model, settings))
    else:
        critic = (
            _adapter_critic(policy, causal) if settings.critic == "adapter" else SharedCritic(_new_value_head(causal))
        )
    device = causal.get_input_embeddings().weight.device
    if device.type != "meta":
        if next(critic.parameters()).device != device:
            critic.to(device)
        shard_like(critic, causal)
    add_critic(causal, critic)


def _new_value_head(causal: Any) -> ValueHead:
    return ValueHead(causal.config.get_text_config().hidden_size)


# a separate model


def _classifier(policy: nn.Module, causal: Any, origin: Any, value_model: Any, settings: CriticSettings) -> Any:
    """Return the value model passed in, a reward model's checkpoint, or the policy's backbone with a zero head."""
    if value_model is not None and settings.value_model_path is not None:
        raise ArgumentError("value_model and value_model_path name two critics; give one.")
    source = value_model if value_model is not None else settings.value_model_path
    if isinstance(source, nn.Module):
        return _checked(source)
    if source is not None:
        trusted = {"trust_remote_code": True} if settings.model.trust_remote_code else {}
        return _checked(_load_classifier(causal, str(source), trusted))
    _require_classifier_class(causal.config)
    if isinstance(origin, str):
        classifier = from_pretrained(
            AutoModelForSequenceClassification, origin, may_lack="score.", num_labels=1, **settings.model.load_kwargs
        )
    else:
        classifier = _on_same_backbone(policy, causal)
    classifier.score = _new_value_head(causal)
    return _checked(classifier)


def _require_classifier_class(config: Any) -> None:
    """Raise ArgumentError if neither transformers nor the model's repository has a classifier of its family."""
    has_custom_class = "AutoModelForSequenceClassification" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not has_custom_class:
        raise ArgumentError(
            f"critic='model' is a sequence classifier of the policy's family, and transformers has none for {config.model_type}: "
            "set critic='head' or 'adapter', or pass value_model, a classifier of another family with the policy's tokenizer."
        )


def _load_classifier(causal: Any, name: str, options: dict[str, Any]) -> nn.Module:
    """Load a trained classifier by name or path."""
    # A policy on the meta device gets its weights from rank 0 later, and so does the critic.
    if causal.get_input_embeddings().weight.is_meta:
        classifier: nn.Module = init_without_weights(
            AutoModelForSequenceClassification, name, {"num_labels": 1, **options}
        )
        return classifier
    return load_classifier(name, options)


def _on_same_backbone(policy: nn.Module, causal: Any) -> Any:
    """Return a classifier with a copy of the policy's backbone, without its adapters."""
    if getattr(policy, "is_quantized", False):
        raise ArgumentError("critic='model' on a quantised policy needs a value_model, or value_model_path.")
    config = copy.deepcopy(causal.config)
    config.num_labels = 1
    classifier = AutoModelForSequenceClassification.from_config(config, dtype=causal.dtype)
    copies, source = dict(classifier.named_parameters()), _ExportedParameter()
    with torch.no_grad():
        for exported in exported_parameters(policy, source, "base"):
            if exported.name in copies:
                with gather_zero3_params(source.parameter, copies[exported.name]):
                    copies[exported.name].copy_(source.parameter)
    return classifier


class _ExportedParameter:
    """The parameter that is exported now; no strategy has sharded it yet."""

    parameter: nn.Parameter

    def __call__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter


def _checked(classifier: Any) -> Any:
    score = getattr(classifier, "score", None)
    if getattr(getattr(classifier, "config", None), "num_labels", None) != 1 or not isinstance(score, nn.Linear):
        raise ArgumentError(
            f"value_model is a {type(classifier).__name__}; a critic is a transformers sequence classifier with one label and a "
            "linear `score` (AutoModelForSequenceClassification, num_labels=1)."
        )
    if not isinstance(score, ValueHead):
        unbiased = ValueHead(score.in_features)
        unbiased.weight = score.weight
        if score.bias is not None:
            raise ArgumentError(f"the score of {type(classifier).__name__} has a bias, which a critic cannot have.")
        classifier.score = unbiased
    classifier.requires_grad_(True)
    return classifier


# a separate adapter


def _adapter_critic(policy: Any, causal: Any) -> AdapterCritic:
    if not is_peft(policy):
        raise ArgumentError(
            "critic='adapter' needs a policy under LoRA: pass peft_config, or choose 'head' or 'model'."
        )
    (active,) = policy.active_adapters
    if policy.peft_config[active].modules_to_save:
        raise ArgumentError(
            "critic='adapter' with modules_to_save: the critic would need separate copies of these modules; leave "
            "modules_to_save out, or choose critic='head'."
        )
    with keep_critic_trainable(policy):
        policy.add_adapter(CRITIC, copy.deepcopy(policy.peft_config[active]))
        policy.set_adapter(active)
    critic = AdapterCritic(_new_value_head(causal))
    layers = decoder_layers(policy)
    outside = _adapted(policy) - {id(part) for layer in layers for part in layer.modules()}
    if outside:
        raise ArgumentError(
            "critic='adapter' needs adapters in the decoder's layers alone: leave the embeddings and the head out of "
            "target_modules, or choose critic='head'."
        )
    install_adapter_switches(critic, layers)
    return critic


def _adapted(policy: nn.Module) -> set[int]:
    return {id(part) for part in policy.modules() if hasattr(part, "lora_A")}


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
    """Write a critic that is a separate model as a Hugging Face sequence classifier, slice by slice.

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

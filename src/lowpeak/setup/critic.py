"""The critic of PPO, built as its settings describe: on the policy's backbone, in an adapter, or as a separate model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

from lowpeak.arguments import CriticSettings
from lowpeak.errors import ArgumentError
from lowpeak.heads import (
    CRITIC,
    AdapterCritic,
    SeparateCritic,
    SharedCritic,
    ValueHead,
    add_critic,
    causal_lm,
    install_adapter_switches,
    is_peft,
    keep_critic_trainable,
)
from lowpeak.models import from_pretrained, gather_zero3_params, init_without_weights
from lowpeak.parallel import decoder_layers, exported_parameters, shard_like
from lowpeak.rewards import load_classifier


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

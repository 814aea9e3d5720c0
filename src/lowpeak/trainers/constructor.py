"""Constructor arguments of TRL's trainers: those that are rejected, their kinds, and those that change a run's arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from lowpeak.arguments import default_value
from lowpeak.errors import ArgumentError

# Arguments of TRL's trainers that have no effect here, each with the reason and the remedy.
UNSUPPORTED: dict[str, str] = {
    "tokenizer": "pass it as processing_class",
    "data_collator": "the trainer reads rows itself and packs them under a token budget; prepare the dataset instead (SFTTrainer "
    "and RewardTrainer take train_dataset as the fourth argument, DPOTrainer and KTOTrainer as the fifth, as in TRL)",
    "compute_loss_func": "the loss is computed in the model's head, without logits; override make_algorithm in a subclass",
    "compute_metrics": "evaluation generates completions and rewards them; log other numbers with log_metric in a reward function",
    **dict.fromkeys(
        ("tools", "environment_factory"),
        "an offline trainer calls no tools; put their schemas into the dataset's column tools and the calls into its messages, or "
        "train with GRPOTrainer, RLOOTrainer, PPOTrainer or OnlineDPOTrainer",
    ),
    "preprocess_logits_for_metrics": "this trainer's evaluation computes no logits; leave it out",
}


def reject_unsupported(trainer: object, arguments: Mapping[str, Any]) -> None:
    """Raise ArgumentError for the first argument that is not None, TypeError for a name that TRL does not have."""
    for name, value in arguments.items():
        if name not in UNSUPPORTED:
            raise TypeError(f"{type(trainer).__name__}.__init__() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ArgumentError(f"{name} is not supported: {UNSUPPORTED[name]}.")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def _are_optimizers(value: Any) -> bool:
    return _is_pair(value) and all(
        each is None or (hasattr(each, method) and not isinstance(each, type))
        for each, method in zip(value, ("param_groups", "get_last_lr"), strict=True)
    )


# What each of these arguments must be.
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("ref_model", "value_model", "teacher_model"),
        (lambda x: x is None or isinstance(x, str | PathLike | nn.Module), "a name, a path or a torch module"),
    ),
    **dict.fromkeys(
        ("rollout_func", "formatting_func", "compute_metrics", "preprocess_logits_for_metrics"),
        (lambda x: x is None or callable(x), "a function"),
    ),
    "reward_processing_classes": (
        lambda x: x is None or isinstance(x, list | tuple) or callable(x), "a tokenizer, or a list of tokenizers and None"
    ),
    "callbacks": (
        lambda x: x is None or (isinstance(x, list | tuple) and all(hasattr(each, "on_step_end") for each in x)),
        "a list of transformers.TrainerCallback",
    ),
    "optimizers": (_are_optimizers, "a tuple of an optimizer and a schedule, made of their classes, or None for each"),
    "optimizer_cls_and_kwargs": (lambda x: x is None or _is_pair(x), "a tuple of a class and a dict of its arguments"),
}  # fmt: skip


def check_kinds(**arguments: Any) -> None:
    """Raise ArgumentError for the first argument with a value of another kind."""
    for name, value in arguments.items():
        is_kind, kind = _KINDS[name]
        if not is_kind(value):
            raise ArgumentError(f"{name} must be {kind}, got {value!r:.80} of type {type(value).__name__}.")


def passed_or_named(models: list[Any], args: Any, name: str) -> list[Any]:
    """Return the models that are passed, or else the one whose path is the argument `name`; ArgumentError for another path."""
    path = getattr(args, name, None)
    paths = [getattr(getattr(each, "config", None), "_name_or_path", each) for each in models]
    if models and path is not None and path not in paths:
        raise ArgumentError(f"{name}={path!r} is no model that is passed to the trainer: remove one of the two.")
    return models or ([] if path is None else [path])


def check_optimized(optimizer: Any, policy: nn.Module) -> None:
    """Raise ArgumentError for a passed optimizer that has no trainable parameter of the policy."""
    if optimizer is None:
        return
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(parameter.requires_grad and id(parameter) in optimized for parameter in policy.parameters()):
        raise ArgumentError(
            "the optimizer in optimizers has none of the policy's trainable parameters: make it from the parameters of the module "
            "that is passed as model, or set optim and learning_rate in its place."
        )


def reject_virtual_tokens(model: Any, peft_config: Any) -> None:
    """Raise ArgumentError for prompt, prefix and P-tuning: peft ignores the position ids of packed sequences."""
    for config in (peft_config, getattr(model, "active_peft_config", None)):
        if getattr(config, "is_prompt_learning", False):
            raise ArgumentError(
                f"{type(config).__name__} is not supported: neither packed sequences nor the engine's cache have its "
                "virtual tokens; use LoraConfig, or another adapter of weights."
            )


def make_arguments(config_class: Any, args: Any, model: Any, quantization_config: Any) -> Any:
    """Return `args` as a `config_class`; None are its defaults. `quantization_config` joins a copy's `model_init_kwargs`.

    Raises ArgumentError for arguments of another class than this one and transformers' own, and for a quantization config that
    is set twice or has no effect.
    """
    if args is None:
        args = config_class(output_dir=f"{_name_of(model)}-{config_class.__name__.removesuffix('Config')}")
    if type(args) is TrainingArguments:
        args = _from_plain(config_class, args)
    if not isinstance(args, config_class):
        class_name = f"{type(args).__module__}.{type(args).__name__}".removeprefix("builtins.")
        raise ArgumentError(f"args is a {class_name}; this trainer takes a lowpeak.{config_class.__name__}.")
    if quantization_config is None:
        return args
    if not isinstance(model, str):
        raise ArgumentError(
            "quantization_config has no effect: the model is loaded already; pass its name or path, or load it with the config."
        )
    loading = args.model_init_kwargs or {}
    if "quantization_config" in loading:
        raise ArgumentError("quantization is in quantization_config and in model_init_kwargs: set it once.")
    args = copy.copy(args)
    args.model_init_kwargs = {**loading, "quantization_config": quantization_config}
    return args


def _from_plain(config_class: Any, args: TrainingArguments) -> Any:
    """Return the trainer's config with the values of transformers' arguments, their defaults included."""
    values = {each.name: getattr(args, each.name) for each in fields(args) if each.init}
    del values["remove_unused_columns"]  # its default, True, never acts here
    config = config_class(**values)
    config.given = frozenset(name for name, value in values.items() if value != default_value(args, name))
    return config


def base_arguments(args: Any, policy: nn.Module | None = None) -> Any:
    """Return the copy of the acting arguments that transformers' Trainer gets for this policy."""
    inner = copy.copy(args)
    if policy is not None and all(parameter.dtype == torch.bfloat16 for parameter in policy.parameters()):
        inner.mixed_precision = (
            "no"  # it computes in bf16 as it is; under FSDP2 accelerate would convert the weights to fp32
        )
    inner.gradient_accumulation_steps = 1  # a step is one mapping
    # The pipeline removes old checkpoints: transformers deletes in place, and at the end of a run also the last one.
    inner.save_total_limit = None
    inner.logging_nan_inf_filter = False
    # Callbacks of TRL generate in batches of this size.
    inner.per_device_eval_batch_size = args.eval_batch_size
    inner.saves_no_tokens = True  # transformers pickles the arguments with every model that it saves or uploads
    return inner


def _name_of(model: Any) -> str:
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
    return Path(str(name)).name or "model"

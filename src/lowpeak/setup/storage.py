"""The storage format that acts in a run: each device's share, and arguments without effect."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from lowpeak.arguments import EffectReport, ModelSettings, StorageFormat
from lowpeak.errors import ArgumentError
from lowpeak.optim import compact_optimizer
from lowpeak.parallel import DeviceFractions, device_fractions
from lowpeak.training import BuildContext, RunContext

logger = logging.getLogger(__name__)

_CHOICE = "get_optimizer_cls_and_kwargs"


def acting_storage(settings: ModelSettings, policy: nn.Module) -> StorageFormat | None:
    """Return the storage format that acts on the trained weights."""
    return settings.adapter_storage if _trains_adapter_alone(policy) else settings.storage


def _trains_adapter_alone(policy: nn.Module) -> bool:
    return all("lora_" in name for name, parameter in policy.named_parameters() if parameter.requires_grad)


def storage_fractions(context: RunContext, storage: StorageFormat | None) -> DeviceFractions:
    """Return the fractions of weights, gradients and states on each rank's device under the strategy and the format."""
    shares = device_fractions(context.accelerator)
    is_sharded = storage is not None and storage.shard_states
    return replace(shares, states=shares.states / context.accelerator.num_processes) if is_sharded else shares


def set_optimizer(context: BuildContext, args: Any, storage: StorageFormat) -> None:
    """Make the trainer create the optimizer of a format; ArgumentError if its class chooses another one."""
    chooses = getattr(type(context), _CHOICE, None)
    if chooses is not None and chooses is not getattr(Trainer, _CHOICE):
        raise ArgumentError(
            f"{type(context).__name__}.{_CHOICE} has no effect, because lowpeak's AdamW stores {storage}: remove that method, or "
            "remove dtype, weight_bits and the other storage arguments."
        )
    logger.info("Storage of training: %s.", storage)
    context.optimizer_cls_and_kwargs = compact_optimizer(args, storage)


def add_idle_storage(
    effects: EffectReport, args: Any, settings: ModelSettings, policy: nn.Module, storage: StorageFormat | None
) -> None:
    """Add storage arguments that act on no weight, and `bf16=False` with bf16 weights."""
    for name in ("weight_bits", "gradient_bits") if _trains_adapter_alone(policy) else ():
        value = getattr(settings, name)
        if value is not None:
            effects.add(f"{name}={value}", "all trained weights are LoRA's, which are fp32")
    if storage is not None and settings.state_bits == 8 and not _has_8_bit_states(args, policy, storage):
        effects.add(
            "state_bits=8",
            "no trained matrix has 4,096 values in rows that a number from 32 to 128 divides, so all optimizer states are fp32",
        )
    if _chose_fp32_products(args) and all(parameter.dtype == torch.bfloat16 for parameter in policy.parameters()):
        effects.add("bf16=False", "all weights are bf16, and so are their products")


def _chose_fp32_products(args: Any) -> bool:
    """Return whether the user set `bf16=False`; a copy by dataclasses.replace() gives every argument."""
    given: frozenset[str] = getattr(args, "given", frozenset())
    return not args.bf16 and "bf16" in given and len(given) < sum(each.init for each in fields(args))


def _has_8_bit_states(args: Any, policy: nn.Module, storage: StorageFormat) -> bool:
    kind, options = compact_optimizer(args, storage)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = kind(trained, **options)
    return any(optimizer.block(parameter) is not None for parameter in trained)

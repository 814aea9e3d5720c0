"""Needs of models of fake tensors: quantised layers without bitsandbytes, and conversions. bitsandbytes needs real tensors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

import lowpeak.models
from lowpeak.errors import ModelError
from lowpeak.models import auto_class, freeze_other_modalities, make_whole_models

_BLOCK = 64  # weights that share an fp32 scale in 4 bits (Dettmers et al. 2023, arXiv 2305.14314, section 3)


def make_model(auto: Any, config: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the model of a transformers' auto class, its weights not initialised: fake ones have no values."""
    classes = auto_class(auto, config)
    if type(config) not in classes._model_mapping and not getattr(config, "auto_map", None):
        raise ModelError(
            f"transformers has no {auto.__name__} for {config.model_type}: choose a model of another family."
        )
    with make_whole_models():
        # A config of the model's own code was loaded with trust_remote_code.
        is_trusted = type(config).__module__.startswith("transformers_modules.")
        model = classes.from_config(config, dtype=dtype, trust_remote_code=is_trusted)
    model.tie_weights()
    freeze_other_modalities(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # It reads token ids, whose values a plan does not have.
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    return model


def without_weights(config: Any, auto: Any = AutoModelForCausalLM) -> Any:
    """Return the model of a config, for questions about its architecture."""
    with unset_fake_temporarily(), FakeTensorMode():
        return make_model(auto, copy.deepcopy(config))


def make_classifier(config: Any, dtype: torch.dtype) -> Any:
    """Return a model of one score, such as a reward model."""
    config = copy.deepcopy(config)
    config.num_labels, config.get_text_config().pad_token_id = 1, 0
    return make_model(AutoModelForSequenceClassification, config, dtype)


def make_teacher(config: Any, loading: Mapping[str, Any]) -> Any:
    """Return a teacher as `from_pretrained(..., **loading)` would load it."""
    dtype = loading.get("dtype", "auto")
    dtype = config.dtype or torch.float32 if dtype == "auto" else dtype
    model = make_model(
        AutoModelForCausalLM, copy.deepcopy(config), getattr(torch, dtype) if isinstance(dtype, str) else dtype
    )
    packing: Any = loading.get("quantization_config") or {}
    packing = packing if isinstance(packing, dict) else packing.to_dict()
    bits: Any = 4 if packing.get("load_in_4bit") else 8 if packing.get("load_in_8bit") else None
    if bits is not None:
        quantize(model, bits)
    return model


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that stores its weight in 4 or 8 bits, and widens it for each product."""

    def __init__(self, like: nn.Linear | Conv1D, bits: Literal[4, 8]) -> None:
        nn.Module.__init__(self)
        shape = (like.nf, like.nx) if isinstance(like, Conv1D) else like.weight.shape
        self.out_features, self.in_features = shape
        numel = like.weight.numel()
        packed: Any = nn.Parameter(torch.empty(numel * bits // 8, 1, dtype=torch.uint8), requires_grad=False)
        packed.unquantized_numel = numel
        self.weight, self.bias = packed, like.bias
        scales = numel // _BLOCK if bits == 4 else self.out_features
        self.register_buffer("scales", torch.empty(scales, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        return _QuantizedProduct.apply(hidden, self.weight, (self.out_features, self.in_features), self.bias)


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, packed: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        ctx.shape = shape
        return nn.functional.linear(hidden, hidden.new_empty(shape), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad @ grad.new_empty(ctx.shape), None, None, None


def quantize(model: Any, bits: Literal[4, 8]) -> None:
    """Replace a model's products as transformers does for bitsandbytes: not the head, nor experts of three dimensions.

    An adapter on it widens what stays 16-bit, as on a quantised model.
    """
    kept = get_keys_to_not_convert(model) + list(model._keep_in_fp32_modules or ())
    for name, module in list(model.named_modules()):
        if type(module) in (nn.Linear, Conv1D) and should_convert_module(name, kept):
            model.set_submodule(name, QuantizedLinear(module, bits))
    model.is_quantized = model.config.get_text_config()._is_quantized = True  # which mixers read


def adapts_quantized(peft_config: Any) -> Any:
    """Return the config with which LoRA adapts a `QuantizedLinear` as a product, also where peft targets its parameter.

    So it does for bitsandbytes' layers: the router of AFMoE is one.
    """
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    if not isinstance(peft_config, LoraConfig):
        return peft_config
    config = copy.copy(peft_config)
    config._custom_modules = {**(config._custom_modules or {}), QuantizedLinear: Linear}
    return config


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep warnings of loaded models silent: a plan shows the dtypes of weights itself, and makes the model several times."""
    logger = logging.getLogger(lowpeak.models.__name__)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def convert_by_assignment() -> Iterator[None]:
    """Let `module.to(...)` assign converted parameters: torch would swap fake ones, which cannot be swapped."""
    convert = nn.Module._apply

    def assign(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        for module in self.modules() if recurse else (self,):
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.data = fn(parameter.data)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else fn(buffer)
        return self

    nn.Module._apply = assign  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]

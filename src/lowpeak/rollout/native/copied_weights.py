"""16-bit copies of fp32 weights, for a rollout under autocast."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lowpeak.memory import is_out_of_memory

_logger = logging.getLogger(__name__)


@contextmanager
def weight_copies(model: nn.Module, dtype: torch.dtype | None, max_bytes: int) -> Iterator[None]:
    """Let matrix products read copies of fp32 weights in autocast's `dtype`, made once for the block; None: no autocast.

    Values are those of autocast, which casts all weights again for each token, and a layer's input for each product. Nothing is
    copied if the copies take more than `max_bytes`, or if memory runs out.
    """
    weights = [] if dtype is None else list(_cast_weights(model))
    copies = {} if dtype is None else _copy({parameter for *_, parameter in weights}, dtype, max_bytes)
    with ExitStack() as stack:
        for module, name, parameter in weights if copies else ():
            module._parameters[name] = copies[parameter]
            stack.callback(module._parameters.__setitem__, name, parameter)
        if copies:
            _cast_inputs_once(stack, {module for module, *_ in weights})
        yield


def _cast_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the fp32 parameters that autocast casts in every use: of plain linear layers.

    Subclasses may use theirs otherwise, and grouped products of experts take no part in autocast.
    """
    read_by_dora = {part for layer in model.modules() if _is_dora(layer) for part in layer.modules()}
    for module in model.modules():
        is_cast = type(module) in (nn.Linear, Conv1D) and not getattr(module, "computes_in_fp32", False)
        if is_cast and module not in read_by_dora:
            for name, parameter in module._parameters.items():
                if parameter is not None and _is_plain_fp32(parameter):
                    yield module, name, parameter


def _is_dora(layer: nn.Module) -> bool:
    """Return whether a layer is peft's DoRA, which reads the weights inside of it in fp32, for their norms."""
    return bool(getattr(layer, "lora_magnitude_vector", None))


def _is_plain_fp32(parameter: Tensor) -> bool:
    # Distributed tensors wrap others.
    return parameter.dtype == torch.float32 and not hasattr(type(parameter), "__tensor_flatten__")


def _copy(parameters: set[nn.Parameter], dtype: torch.dtype, max_bytes: int) -> dict[nn.Parameter, nn.Parameter]:
    """Return a copy of each parameter; none if they exceed `max_bytes` or memory runs out."""
    if dtype.itemsize * sum(parameter.numel() for parameter in parameters) > max_bytes:
        return {}
    try:
        return {each: nn.Parameter(each.detach().to(dtype), requires_grad=False) for each in parameters}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _logger.warning("Out of memory for copies of the weights in %s: they are cast again for each token.", dtype)
        return {}


def _cast_inputs_once(stack: ExitStack, modules: set[nn.Module]) -> None:
    """Let linear layers in a row that have one input share its cast."""
    last: list[Tensor] = []  # the last input, and its cast

    def multiply(linear: Any, hidden: Tensor) -> Tensor:
        if not last or last[0] is not hidden:
            last[:] = hidden, hidden.to(linear.weight.dtype)
        return F.linear(last[1], linear.weight, linear.bias)

    for module in modules:
        if type(module) is nn.Linear and "forward" not in module.__dict__:
            module.__dict__["forward"] = partial(multiply, module)
            stack.callback(module.__dict__.pop, "forward")
    stack.callback(last.clear)

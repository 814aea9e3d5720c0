"""Bytes of a sequence in a model's KV cache, measured: forwards of one and of two tokens on tensors without storage.

A config does not tell what layers store: latents, windows, states, keys that other layers share."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers.cache_utils import DynamicCache

from lowpeak.errors import EngineError
from lowpeak.heads import transformers_model
from lowpeak.models import make_whole_models
from lowpeak.rollout.native.cache import cache_argument, parameter_dtype, text_config

_UNLIMITED = 1 << 30  # tokens of a window


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of each token by its layers' window (None: without one), and bytes of states, which no token adds to.

    They are an upper bound where the model's code cannot run on tensors without storage.
    """

    by_window: dict[int | None, int]
    states: int
    is_measured: bool = True

    def of(self, num_tokens: int) -> int:
        """Return the bytes of a sequence of so many tokens."""
        tokens = sum(each * min(num_tokens, size or num_tokens) for size, each in self.by_window.items())
        return tokens + self.states


def sequence_bytes(model: nn.Module, num_tokens: int, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a sequence of so many tokens in the KV cache; `dtype` as for `measure_cache`."""
    return measure_cache(model, dtype).of(num_tokens)


def measure_cache(model: nn.Module, dtype: torch.dtype | None = None) -> CacheBytes:
    """Return the bytes that a sequence takes in the KV cache.

    `dtype` is the cache's. None stands for the parameters' dtype, but at least two bytes: 8-bit parameters have wider
    keys and values. Under autocast keys and values are narrower than the parameters.
    """
    dtype = dtype or parameter_dtype(model)
    dtype = dtype if dtype.itemsize > 1 else torch.bfloat16
    causal = transformers_model(model)
    text = json.dumps(causal.config.to_dict(), sort_keys=True, default=str)
    return _measure(_Architecture(type(causal), text, causal.config), dtype)


def bytes_per_token(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Return the bytes that a second token adds to a sequence in the KV cache."""
    return sequence_bytes(model, 2, dtype) - sequence_bytes(model, 1, dtype)


@dataclass(frozen=True)
class _Architecture:
    """A model's class and config, compared by the config's text, so that each is measured once."""

    model_class: type
    text: str
    config: Any = field(compare=False)


@lru_cache(maxsize=64)
def _measure(architecture: _Architecture, dtype: torch.dtype) -> CacheBytes:
    config = copy.deepcopy(architecture.config)
    config._attn_implementation = "eager"
    try:
        with _disable_current_modes(), FakeTensorMode(), torch.no_grad():
            model = _make(architecture.model_class, config, dtype)
            for name, module in model.named_modules():
                if name.endswith(".experts"):  # some read values, and none stores keys
                    module.forward = lambda hidden, *_: hidden
            one, two = (_layer_bytes(model, num_tokens) for num_tokens in (1, 2))
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return _most_bytes(config, dtype)
    by_window: dict[int | None, int] = defaultdict(int)
    states = 0
    for (window, first), (_, both) in zip(one, two, strict=True):
        by_window[window] += both - first
        states += 2 * first - both
    return CacheBytes(dict(by_window), states)


def _most_bytes(config: Any, dtype: torch.dtype) -> CacheBytes:
    """Return the bytes if no head shared keys and values, for models whose code reads tensors' values."""
    text = config.get_text_config(decoder=True)
    hidden, layers = (getattr(text, name, None) for name in ("hidden_size", "num_hidden_layers"))
    if hidden is None or layers is None:
        raise EngineError(
            f"{type(text).__name__} does not define hidden_size and num_hidden_layers, so the memory of its KV cache "
            "is unknown: generate with vLLM (use_vllm=True)."
        )
    heads, head_dim = (getattr(text, name, None) or 0 for name in ("num_attention_heads", "head_dim"))
    return CacheBytes({None: 2 * layers * max(hidden, heads * head_dim) * dtype.itemsize}, 0, is_measured=False)


def _make(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with make_whole_models():
            return model_class(config).eval()
    finally:
        torch.set_default_dtype(default)


def _layer_bytes(model: Any, num_tokens: int) -> list[tuple[int | None, int]]:
    """Return the window of each layer of the cache, and its bytes after so many tokens."""
    cache = DynamicCache(config=text_config(model))
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    for layer, window in zip(cache.layers, windows, strict=True):
        if window is not None:
            layer.sliding_window = _UNLIMITED
    model(input_ids=torch.ones(1, num_tokens, dtype=torch.int64), use_cache=True, **{cache_argument(model): cache})
    windows += [None] * (len(cache.layers) - len(windows))
    return [
        (window, sum(x.nbytes for x in _tensors(vars(layer))))
        for window, layer in zip(windows, cache.layers, strict=True)
    ]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.ndim > 1:
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)

"""The layers of a model's cache, and the slots that there are for them."""

from __future__ import annotations

from typing import Any

from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from lowpeak.attention import FULL, mixers_of, span_of_layer
from lowpeak.heads import transformers_model
from lowpeak.rollout.native.slots import PromptLayer
from lowpeak.rollout.native.state_slots import PromptKeysAndStates, PromptStates

_EMPTY = getattr(cache_utils, "DummyLayer", ())  # a layer that stores nothing, since transformers 5.20
_WITH_STATES = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


def prompt_cache(config: Any) -> Cache:
    """Return the empty cache of a prefill, by the layers of the cache that transformers makes for this config."""
    layers = DynamicCache(config=config).layers
    return Cache(layers=[_prompt_layer(config, i, layer) for i, layer in enumerate(layers)])


def _prompt_layer(config: Any, index: int, layer: Any) -> Any:
    if isinstance(layer, _EMPTY):
        return layer
    if isinstance(layer, LinearAttentionAndFullAttentionLayer):
        return PromptKeysAndStates(layer.number_of_states)
    if isinstance(layer, LinearAttentionLayer):
        return PromptStates(layer.number_of_states)
    return PromptLayer(span_of_layer(config, index) if isinstance(layer, DynamicSlidingWindowLayer) else FULL)


def unsupported_layers(model: Any) -> list[str]:
    """Return a model's kinds of cache layers, and other needs, that slots do not have."""
    causal = transformers_model(model)
    layers = DynamicCache(config=causal.config.get_text_config(decoder=True)).layers
    known = (*_WITH_STATES, DynamicLayer, DynamicSlidingWindowLayer, *([_EMPTY] if _EMPTY else []))
    other = sorted({type(layer).__name__ for layer in layers if type(layer) not in known})
    if (
        not other
        and len({layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)}) > 1
    ):
        other = ["windows of one size"]
    num_states, num_mixers = sum(isinstance(layer, _WITH_STATES) for layer in layers), len(mixers_of(causal))
    if not other and (num_states != num_mixers or getattr(causal, "_is_stateful", False) > num_mixers):
        other = ["a cache for its own states"]
    return other


def storing_layers(cache: Cache) -> list[Any]:
    """Return a cache's layers that store something; one of keys, values and states has two parts."""
    layers = [layer for layer in cache.layers if not isinstance(layer, _EMPTY)]
    return [part for layer in layers for part in (layer, getattr(layer, "states", None)) if part is not None]

"""Which tokens each kind of layer attends to: all before it, those of a sliding window, or those of its chunk.

transformers names the kind of each layer in `config.layer_types`; its models take a mask per name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from lowpeak.errors import ModelError

Position = TypeVar("Position", int, Tensor)


class Span(NamedTuple):
    """The keys of one kind of layer: a token attends to itself and to those before it from `start(position)` on.

    `size` is that of a sliding window, the token included, or with `is_chunk` of a chunk; None: all tokens.
    """

    size: int | None = None
    is_chunk: bool = False

    @property
    def is_window(self) -> bool:
        return self.size is not None and not self.is_chunk

    def start(self, position: Position) -> Position:
        """Return the first position that the token at `position` attends to; it may be below 0."""
        if self.size is None:
            return position * 0
        return position - position % self.size if self.is_chunk else position - (self.size - 1)


FULL = Span()
STATE_TYPES = {"linear_attention", "conv"}  # of layers that do not attend
# The function of transformers' masking by which a family's code applies the spans of a layer type.
_MAKERS = {
    "sliding_attention": "create_sliding_window_causal_mask",
    "chunked_attention": "create_chunked_causal_mask",
}
_SIZES = {"sliding_attention": ("sliding_window", False), "chunked_attention": ("attention_chunk_size", True)}


def spans_by_type(config: Any) -> dict[str, Span]:
    """Return the span of each layer type of a text config; types that attend to no tokens or to chosen ones count as full."""
    types = getattr(config, "layer_types", None)
    if not types:
        sized = [name for name, (size, _) in _SIZES.items() if getattr(config, size, None) is not None]
        types = sized[:1] or ["full_attention"]
    sizes = {name: _SIZES[name] for name in types if name in _SIZES}
    return {name: Span(getattr(config, sizes[name][0]), sizes[name][1]) if name in sizes else FULL for name in types}


def check_spans(model: nn.Module) -> None:
    """Raise ModelError for a transformers model whose cache has windows that its layers do not apply.

    transformers makes caches by the config alone, and each family's code its masks: `generate()` then samples wrong tokens.
    """
    reason = _mismatch(model) if type(model).__module__.startswith("transformers.") else None
    if reason is not None:
        raise ModelError(
            f"the model's config does not fit its class: {reason}. Its cache would drop tokens that its layers attend to: correct "
            "config.json."
        )


def _mismatch(model: Any) -> str | None:
    code, spans = sys.modules[type(model).__module__], spans_by_type(model.config.get_text_config(decoder=True))
    for name in spans.keys() & _MAKERS.keys():
        size = f"{_SIZES[name][0]}={spans[name].size}"
        if not spans[name].size:
            return f"{size}, and a window has at least one token"
        if not hasattr(code, _MAKERS[name]):
            return f"{type(model).__name__} does not apply {size} ({name})"
    of_layers = {span for name, span in spans.items() if name not in STATE_TYPES}
    if len(of_layers) > 1 and "layer_types" not in inspect.getsource(code):
        return f"{type(model).__name__} has layers of one kind, and layer_types lists {', '.join(sorted(spans))}"
    return None


def attends(config: Any) -> bool:
    """Return whether any layer of a text config attends."""
    return not set(spans_by_type(config)) <= STATE_TYPES


def span_of_layer(config: Any, layer: int | None) -> Span:
    """Return the span of a layer by its index, which only models with several spans need."""
    spans = spans_by_type(config)
    return next(iter(spans.values())) if len(set(spans.values())) == 1 else spans[config.layer_types[layer]]


def masks_by_type(config: Any, make_mask: Callable[[Span], Tensor]) -> Tensor | dict[str, Tensor | None] | None:
    """Return the attention mask that a model takes: one tensor, or one for each layer type if their spans differ.

    Layers with states have none: transformers does not pass a mask of four dimensions on to them.
    """
    spans = spans_by_type(config)
    if not attends(config):
        return None
    masks = {span: make_mask(span) for span in set(spans.values())}
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {name: None if name in STATE_TYPES else masks[span] for name, span in spans.items()}

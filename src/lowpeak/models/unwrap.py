"""What adapters' wrappers are around."""

from __future__ import annotations

from typing import Any

from torch import nn


def transformers_model(model: Any) -> Any:
    """Return the model that has `generate`, a named signature and a head: the one inside an adapter's wrapper, if any."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def num_embeddings(model: Any) -> int | None:
    """Return how many tokens the model embeds, below what an adapter wraps its embedding in; None if that does not say."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    while embedding is not None and not hasattr(embedding, "num_embeddings"):
        embedding = getattr(embedding, "base_layer", None) or getattr(embedding, "original_module", None)
    return getattr(embedding, "num_embeddings", None)


def is_peft(model: nn.Module) -> bool:
    """Whether the model is a peft model, without importing peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")

"""Access to the model inside a PEFT wrapper: detection, the transformers model and its vocabulary size."""

from __future__ import annotations

from typing import Any


def transformers_model(model: Any) -> Any:
    """Return the transformers model, from inside a PEFT wrapper if there is one: it has `generate` and a named signature."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def num_embeddings(model: Any) -> int | None:
    """Return the number of tokens that the model embeds, from inside adapters; None if the embedding does not tell it."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    while embedding is not None and not hasattr(embedding, "num_embeddings"):
        embedding = getattr(embedding, "base_layer", None) or getattr(embedding, "original_module", None)
    return getattr(embedding, "num_embeddings", None)


def media_token_ids(model: Any) -> frozenset[int]:
    """Return the token ids in whose place a multimodal model puts images, videos or sound."""
    names = (f"{medium}_token_{kind}" for medium in ("image", "video", "audio") for kind in ("id", "index"))
    ids = (getattr(getattr(model, "config", None), name, None) for name in names)
    return frozenset(id_ for id_ in ids if id_ is not None)


def is_peft(model: Any) -> bool:
    """Return whether the model is a peft model, without importing peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")
